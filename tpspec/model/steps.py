"""What happens between the matrix products of a layer: norm, rope and cache write, attention, gate. What steps promise.

torch_steps.py is the reference, and what runs for many rows on a CPU; compiled.py does the same for a few there,
card/steps.py for few and card/many.py for many on a card. They know rows, slots and masks; must not know drafts, ranks
or which architecture it is.

Shapes: T rows of the round, D hidden, H query heads and G kv heads of this shard, E head dim, C mlp channels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tpspec.comm.meeting import Meeting
    from tpspec.model.batch import Span
    from tpspec.model.delta_net import Made
    from tpspec.model.gates import HeadGate
    from tpspec.model.indexer import Indexer, Read
    from tpspec.model.joint_norm import Columns, JointNorm
    from tpspec.model.late_norm import LateNorm
    from tpspec.model.layers import ConvLayer, Layer, LinearLayer
    from tpspec.model.linear import Linear
    from tpspec.model.norm import Norm


class Steps(Protocol):
    """The steps, over rows that `begin` has made ready. Results may live in memory that the next call reuses."""

    def begin(self, spans: Sequence[Span], num_rows: int) -> Any:
        """The rows of one forward; num_rows counts padding below the last span's."""

    def add_norm(
        self,
        x_TD: Tensor,
        delta_TD: Tensor | None,
        norm: Norm | None,
        delta_norm: Norm | None = None,
        scale: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """(scale (x + delta), norm of that), x as it is where there is no delta, and twice the same where there is no
        norm; may overwrite x. delta_norm: of delta, before it is added."""

    def sum_add_norm(
        self,
        x_TD: Tensor,
        partial_TD: Tensor,
        meeting: Meeting,
        norm: Norm | None,
        delta_norm: Norm | None,
        scale: float,
    ) -> tuple[Tensor, Tensor] | None:
        """add_norm of the sum over ranks of their parts, by one kernel for all; None where there is none."""

    def joined(self, halves_TD: Tensor, norms: tuple[Norm, Norm]) -> Tensor:
        """[2 T, D] -> the sum of the halves' norms, [T, D]."""

    def squares(self, made_TX: Tensor, columns: Columns, before_T2: Tensor | None = None) -> Tensor:
        """Sums of those of queries and of keys, [T, 2] in float32; with those before, which it may overwrite."""

    def jointly_normed(self, qkv_TX: Tensor, sums_T2: Tensor, norm: JointNorm) -> Tensor:
        """With those of all ranks; may overwrite them."""

    def choose(self, layer: Layer, indexer: Indexer, read: Read, round: Any) -> None:
        """Writes the rows' keys of the layer's index, and has it choose what they attend to, where they see more tokens
        than that may be: in this layer, and in those behind it up to the next that chooses."""

    def attention(self, layer: Layer, qkv_TX: Tensor, round: Any) -> Tensor:
        """Writes the rows' keys and values, if the layer keeps any, then attends: [T, H * E]."""

    def weighed(self, attended_TX: Tensor, gate: HeadGate, x_TD: Tensor) -> Tensor:
        """By the gate of what attention read, [T, H * E]."""

    def linear_attention(self, layer: LinearLayer, made: Made, round: Any) -> Tensor:
        """What the mixer's `out` reads, [T, H V], of what its other products made; texts' states go on."""

    def convolved(self, layer: ConvLayer, made_TX: Tensor, round: Any) -> Tensor:
        """What the `out` of a short convolution reads, [T, M], of what its `made` gives; what is left goes on."""

    def beside(self, made_TD: Tensor, squares_T: Tensor, rank: int, size: int) -> Tensor:
        """What ranks sum of what is to have a late norm: [T, Y], see late_norm.py."""

    def normed_late(self, total_TY: Tensor, norm: LateNorm, dim: int) -> Tensor:
        """The norm of that sum, [T, D]."""

    def gate(self, gate_up_TC: Tensor, numbers: tuple[float, ...] = ()) -> Tensor:
        """act(gate) * up, for the act of the shape: [T, 2C] -> [T, C]; of one without a gate act(up), [T, C]. numbers:
        where act is silu, the limit of both, if there is one (limits.py); where it is xielu, its bends (rows.inc)."""

    def gated(self, gate_up: Linear, x_TD: Tensor, numbers: tuple[float, ...] = ()) -> Tensor:
        """The same of what that product makes of rows: [T, D] -> [T, C]."""

    def slots(self, num_rows: int) -> Tensor | None:
        """Of the round's rows, on a card that knows them alone, below 0 where a row is padding; else None."""


class AddNorm(NamedTuple):
    """What the steps make of a sum over ranks. joined: norms of its halves, which are added then; or None. late: a norm
    that has yet to be made of it; or None."""

    steps: Steps
    x_TD: Tensor
    norm: Norm | None
    delta_norm: Norm | None = None
    scale: float = 1.0
    joined: tuple[Norm, Norm] | None = None
    late: LateNorm | None = None

    def __call__(self, total: Tensor) -> tuple[Tensor, Tensor]:
        if self.late is not None:
            total = self.steps.normed_late(total, self.late, self.x_TD.shape[1])
        if self.joined is not None:
            total = self.steps.joined(total, self.joined)
        return self.steps.add_norm(self.x_TD, total, self.norm, self.delta_norm, self.scale)

    def with_peers(self, x: Tensor, meeting: Meeting) -> tuple[Tensor, Tensor] | None:
        if self.joined is not None or self.late is not None:
            return None
        return self.steps.sum_add_norm(self.x_TD, x, meeting, self.norm, self.delta_norm, self.scale)


class MadeSteps(Steps, Protocol):
    """Steps made for some rows, as few or, on a card, many ones."""

    def fits(self, spans: Sequence[Span], num_rows: int) -> bool:
        """Whether these rows, padding and all, are such."""


class RecordedSteps(MadeSteps, Protocol):
    """Whose launches are the same for every forward of as many rows. `begin` is `write`, `put`, `copy` and
    `sent`, in order."""

    def write(self, spans: Sequence[Span], num_rows: int) -> Any:
        """What changes from forward to forward, but for tokens, into memory that no device reads; returns what `begin`
        does, the same for every forward of as many rows."""

    def put(self) -> None:
        """What was written, where `copy` takes it from."""

    def is_copied_whole(self, spans: Sequence[Span]) -> bool:
        """Whether `copy` takes all that is put of them, or `put` itself asks the device for the rest."""

    def copy(self) -> None:
        """What was put, to where the steps read it."""

    def sent(self) -> None:
        """What was put is copied by what the device has been asked for so far."""

    def left(self) -> None:
        """What was put has been copied."""
