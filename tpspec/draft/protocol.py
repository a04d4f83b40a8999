"""What every draft source is: asked for trees, told verdicts. Knows tokens and, if it needs one, a `run` it is handed.

A source knows no rank, device, clock or communicator: where it runs is the host's matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tpspec.request import Sampling
    from tpspec.tokens import TokenTree, Verdict


@dataclass(frozen=True, slots=True)
class Needs:
    """What a source needs to be given; the one place where sources differ for the rest of the house."""

    own_model: bool = False
    gives_q: bool = False


@dataclass(frozen=True, slots=True)
class Ask:
    """Please propose up to num_tokens tokens after `tokens` (prompt and output of sequence `seq`, the root last)."""

    seq: int
    tokens: Sequence[int]
    num_prompt: int
    num_tokens: int
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Feed:
    """Tokens to run through a model at positions [start, start + len(tokens)) of its own cache of sequence `seq`."""

    seq: int
    start: int
    tokens: Sequence[int]


class Run(Protocol):
    """A model with a cache of its own, handed to sources that need one."""

    @property
    def vocab(self) -> int: ...
    def __call__(self, feeds: Sequence[Feed]) -> Tensor:
        """Run the feeds in one forward; logits of the last token of each, [len(feeds), vocab].

        What stood at or after `start` is overwritten. Raises OutOfPages when the cache cannot hold them, and then
        nothing has changed.
        """

    def forget(self, seq: int) -> None:
        """Give back the cache of `seq`; unknown sequences are ignored."""


@dataclass(frozen=True, slots=True)
class Taps:
    """Kept outputs of target layers for the committed rows of a round. Empty until a source asks for some."""


class Drafter(Protocol):
    """Proposes tokens. Late, dead or wrong, it costs speed only."""

    @property
    def needs(self) -> Needs: ...
    def propose(self, asks: Sequence[Ask], run: Run | None) -> list[TokenTree]:
        """One tree for each ask, in order; an empty tree where the source is silent."""

    def observe(self, verdicts: Sequence[Verdict], taps: Taps | None) -> None: ...
    def forget(self, seq: int) -> None: ...
