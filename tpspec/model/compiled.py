"""The steps of steps.py for a few rows on a CPU, in C (rows.c), called through ctypes.

torch spends a dozen dispatches and tens of microseconds on what is a few thousand numbers; this spends a call. Every
row is computed alone and in one order, so its bits never depend on the rows beside it. Must not know what rows mean.

Shapes: T rows of the round, D hidden, H query heads, G kv heads, E head dim, C mlp channels.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tpspec.cache.store import as_slots
from tpspec.model.compiled_states import FLOAT, INT, MOST_SIGHT, POINTER, CompiledStates
from tpspec.model.curves import ALONE
from tpspec.model.torch_steps import WithoutKernels
from tpspec.native import library

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from tpspec.cache.states import StateStore
    from tpspec.cache.store import Cells, KVStore, Slots
    from tpspec.model.batch import Span
    from tpspec.model.delta_net import Made
    from tpspec.model.indexer import Indexer, Read
    from tpspec.model.layers import ConvLayer, Layer, LinearLayer
    from tpspec.model.linear import Linear
    from tpspec.model.norm import Norm
    from tpspec.model.rope import Rope, Turns
    from tpspec.model.sight import Heads, Shape

LIBRARIES = ("tpspec.model._rows_wide", "tpspec.model._rows")  # the first that this CPU can run
VERSION = 21  # of rows.c
MOST_ROWS = 32  # beyond it torch's threads and blocked products win
MOST_DIM = 576
LANES = 16  # of the longest vectors
SUFFIX = {torch.bfloat16: "bfloat16", torch.float32: "float32"}


class _Span(ctypes.Structure):
    """`Span` of rows.c."""

    _fields_ = [("first_row", INT), ("num_rows", INT), ("start", INT), ("held_from", INT), ("num_runs", INT),
                ("runs", POINTER), ("parents", POINTER)]  # fmt: skip


class _Heads(ctypes.Structure):
    """`Heads` of rows.c."""

    _fields_ = [("num_heads", INT), ("num_kv_heads", INT), ("head_dim", INT), ("num_slots", INT), ("kv_of", POINTER)]

    @classmethod
    def of(cls, heads: Heads, num_slots: int, kept: list[object]) -> _Heads:
        kv_of = torch.tensor(heads.kv_of)
        kept.append(kv_of)
        return cls(heads.num, heads.num_kv, heads.dim, num_slots, kv_of.data_ptr())


class _Cache(ctypes.Structure):
    """`Cache` of rows.c: of one layer."""

    _fields_ = [("keys", POINTER), ("values", POINTER), ("key_scales", POINTER), ("value_scales", POINTER)]

    @classmethod
    def of(cls, keys: Cells, values: Cells) -> _Cache:
        scales = (None if cells.scales_GS is None else cells.scales_GS.data_ptr() for cells in (keys, values))
        return cls(keys.numbers_GSE.data_ptr(), values.numbers_GSE.data_ptr(), *scales)


@dataclass(frozen=True, slots=True)
class Placed:
    """Addresses of a round's spans and rows' slots, in layers with or without a window."""

    spans: list[int]
    slots: int


class Indexed(NamedTuple):
    """What an index must know of the rows."""

    turns: Turns
    slots: Slots


@dataclass(frozen=True, slots=True)
class CompiledRound:
    """Addresses of the rows' integers; `kept` keeps what they point at alive. recent: in layers with a window. courses:
    of the spans, in layers that keep states. indexed: of a model with an indexer."""

    whole: Placed
    recent: Placed
    positions: int
    num_real: int
    num_rows: int
    kept: list[object]
    courses: list[int]
    indexed: Indexed | None


class Buffers:
    """Memory for the results of a row count, reused by every layer: each is consumed before it is written again."""

    def __init__(self, num_rows: int, shape: Shape) -> None:
        widths = {heads.num * heads.dim for heads in shape.heads}
        self.q, self.attended = (
            {width: torch.zeros(num_rows, width, dtype=shape.dtype) for width in widths} for _ in range(2)
        )
        self.normed: Tensor | None = None
        self.answered: Tensor | None = None  # of linear attention, or a convolution
        self.gated: dict[int, Tensor] = {}  # by channels: not all MLPs of a model have as many


class CompiledSteps(WithoutKernels):
    """Only for shapes that `fits` accepts."""

    def __init__(
        self, loaded: ctypes.CDLL, shape: Shape, ropes: Sequence[Rope], store: KVStore, states: StateStore | None
    ) -> None:
        self._shape, self._ropes = shape, ropes
        self._store = store  # whose memory the caches point at
        self._kept: list[object] = []
        slots = {False: store.num_slots, True: store.num_recent or store.num_slots}
        self._heads = {sight: _Heads.of(sight.heads, slots[sight.is_windowed], self._kept) for sight in shape.sights}
        self._caches = {layer: _Cache.of(keys, store.values[layer]) for layer, keys in store.keys.items()}
        self._buffers: dict[int, Buffers] = {}
        kind = SUFFIX[shape.dtype]
        self._add_norm = _verb(
            loaded, f"add_norm_{kind}", None,
            [POINTER] * 3 + [FLOAT] + [POINTER] * 2 + [FLOAT, INT, FLOAT] + [POINTER] * 2 + [INT] * 2,
        )  # fmt: skip
        self._place = _verb(loaded, f"place_{kind}", None, [POINTER] * 5 + [FLOAT, INT] + [POINTER] * 7 + [INT] * 2)
        self._attend = _verb(
            loaded, f"attend_{kind}", ctypes.c_int, [POINTER] * 4 + [INT, INT, FLOAT, FLOAT] + [POINTER] * 2
        )
        delta = _verb(loaded, f"delta_{kind}", ctypes.c_int, [POINTER] * 7)
        convolved = _verb(loaded, f"convolved_{kind}", None, [POINTER] * 4)
        self._states = None if states is None else CompiledStates(states, delta, convolved)
        bends = [FLOAT] * 3 if shape.gate == "xielu" else []
        self._gate = _verb(loaded, f"gate_{shape.gate}_{kind}", None, [POINTER] * 2 + [INT] * 2 + bends)
        self._limited = _verb(loaded, f"gate_limited_{kind}", None, [POINTER] * 2 + [INT] * 2 + [FLOAT])

    def fits(self, spans: Sequence[Span], num_rows: int) -> bool:
        most = self._shape.chosen
        sees_all = most is None or all(span.start + len(span.tokens) <= most for span in spans)
        return num_rows <= MOST_ROWS and sees_all

    def begin(self, spans: Sequence[Span], num_rows: int) -> CompiledRound:
        positions = torch.tensor([position for span in spans for position in span.positions()])
        kept: list[object] = [positions]
        whole = recent = _placed(spans, kept, windowed=False)
        if self._store.recent:
            recent = _placed(spans, kept, windowed=True)
        of_spans = [] if self._states is None else self._states.courses(spans, kept)
        indexed = None if self._shape.chosen is None else self._indexed(spans, positions)
        return CompiledRound(whole, recent, positions.data_ptr(), len(positions), num_rows, kept, of_spans, indexed)

    def _indexed(self, spans: Sequence[Span], positions_T: Tensor) -> Indexed:
        slots = [slot for span in spans for slot in span.own_slots()]
        return Indexed(self._ropes[-1].at(positions_T), as_slots(slots, self._shape.device))

    def add_norm(
        self,
        x_TD: Tensor,
        delta_TD: Tensor | None,
        norm: Norm | None,
        delta_norm: Norm | None = None,
        scale: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """x is overwritten by what is the first of the two."""
        num_rows, dim = x_TD.shape
        buffers = self._of(num_rows)
        if buffers.normed is None:
            buffers.normed = torch.empty_like(x_TD)
        at, delta = x_TD.data_ptr(), None if delta_TD is None else delta_TD.data_ptr()
        first = (None, 0.0) if delta_norm is None else (delta_norm.weight.data_ptr(), delta_norm.eps)
        out = buffers.normed.data_ptr()
        weight = bias = None
        if norm is not None:
            weight, bias = norm.weight.data_ptr(), None if norm.bias is None else norm.bias.data_ptr()
        eps, centred = (0.0, 0) if norm is None else (norm.eps, int(norm.centred))
        self._add_norm(at, delta, *first, weight, bias, eps, centred, scale, at, out, num_rows, dim)
        return x_TD, x_TD if norm is None else buffers.normed

    def choose(self, layer: Layer, indexer: Indexer, read: Read, round: CompiledRound) -> None:
        """There is no choice: see `fits`."""
        assert round.indexed is not None, "as the shape says"
        key_T1I = indexer.keys(read.key_TI[: round.num_real], round.indexed.turns)
        self._store.indexes[layer.index].write(round.indexed.slots, key_T1I)

    def attention(self, layer: Layer, qkv_TX: Tensor, round: CompiledRound) -> Tensor:
        sight, buffers = layer.sight, self._of(round.num_rows)
        width = sight.heads.num * sight.heads.dim
        q, attended = buffers.q[width].data_ptr(), buffers.attended[width]
        heads, cache = ctypes.addressof(self._heads[sight]), ctypes.addressof(self._caches[layer.kept_by])
        sinks = None if layer.sinks is None else layer.sinks.data_ptr()
        placed, out = round.recent if sight.is_windowed else round.whole, attended.data_ptr()
        self._place_rows(layer, qkv_TX, round, placed, heads, q, cache)
        scale, cap = self._shape.score_scale, self._shape.score_cap or 0.0
        for span in placed.spans:
            if self._attend(heads, span, q, cache, sight.window or 0, sight.chunked, scale, cap, sinks, out):
                raise MemoryError("attention over the cache found no memory for its scores")
        return attended

    def linear_attention(self, layer: LinearLayer, made: Made, round: CompiledRound) -> Tensor:
        assert self._states is not None, "a decoder with such layers has a store for them"
        buffers = self._of(round.num_rows)
        if buffers.answered is None:
            buffers.answered = torch.zeros_like(made.gate_TX)
        self._states.linear_attention(layer, made, round.courses, buffers.answered)
        return buffers.answered

    def convolved(self, layer: ConvLayer, made_TX: Tensor, round: CompiledRound) -> Tensor:
        assert self._states is not None, "a decoder with such layers has a store for them"
        buffers = self._of(round.num_rows)
        if buffers.answered is None:
            buffers.answered = made_TX.new_zeros(round.num_rows, layer.mixer.kernel.shape[1])
        self._states.convolved(layer, made_TX, round.courses, buffers.answered)
        return buffers.answered

    def gate(self, gate_up_TC: Tensor, numbers: tuple[float, ...] = ()) -> Tensor:
        num_rows, channels = gate_up_TC.shape
        channels //= 1 if self._shape.gate in ALONE else 2
        gated = self._of(num_rows).gated
        if channels not in gated:
            gated[channels] = gate_up_TC.new_empty(num_rows, channels)
        given = gate_up_TC.data_ptr(), gated[channels].data_ptr(), num_rows, channels
        act = self._limited if numbers and self._shape.gate == "silu" else self._gate
        act(*given, *numbers)
        return gated[channels]

    def gated(self, gate_up: Linear, x_TD: Tensor, numbers: tuple[float, ...] = ()) -> Tensor:
        return self.gate(gate_up(x_TD), numbers)

    def _place_rows(
        self, layer: Layer, qkv_TX: Tensor, round: CompiledRound, placed: Placed, heads: int, q: int, cache: int
    ) -> None:
        cos = sin = gains = None
        norms = layer.q_norm, layer.k_norm, layer.v_norm
        weights = [None if norm is None else norm.weight.data_ptr() for norm in norms]
        eps = next((norm.eps for norm in norms if norm is not None), 0.0)
        if layer.rope is not None:
            rope = self._ropes[layer.rope]
            cos, sin = rope.cos_PE.data_ptr(), rope.sin_PE.data_ptr()
            gains = None if rope.gains_P is None else rope.gains_P.data_ptr()
        self._place(
            heads, qkv_TX.data_ptr(), *weights, eps, int(layer.turns_first), cos, sin, gains, round.positions,
            placed.slots, q, cache, qkv_TX.shape[1], round.num_real,
        )  # fmt: skip

    def _of(self, num_rows: int) -> Buffers:
        buffers = self._buffers.get(num_rows)
        if buffers is None:
            buffers = self._buffers[num_rows] = Buffers(num_rows, self._shape)
        return buffers


def compiled_steps(
    shape: Shape, ropes: Sequence[Rope], store: KVStore, states: StateStore | None = None
) -> CompiledSteps | None:
    """The compiled steps, where there is a library for this machine and the shape is one of theirs."""
    if shape.device.type != "cpu" or shape.dtype not in SUFFIX:
        return None
    if any(heads.dim % LANES or heads.dim > MOST_DIM for heads in shape.heads):
        return None
    if states is not None and states.sizes.num_before >= MOST_SIGHT:
        return None
    loaded = compiled_rows()
    return None if loaded is None else CompiledSteps(loaded, shape, ropes, store, states)


def compiled_rows() -> ctypes.CDLL | None:
    """The library of this machine, if there is one."""
    found = map(library, LIBRARIES)
    return next((loaded for loaded in found if loaded is not None and loaded.rows_version() == VERSION), None)


def _placed(spans: Sequence[Span], kept: list[object], *, windowed: bool) -> Placed:
    slots = torch.tensor([slot for span in spans for slot in span.own_slots(windowed=windowed)])
    made: list[_Span] = []
    first = 0
    for span in spans:
        made.append(_c_span(span, first, kept, windowed=windowed))
        first += len(span.tokens)
    kept += [slots, made]
    return Placed([ctypes.addressof(span) for span in made], slots.data_ptr())


def _c_span(span: Span, first_row: int, kept: list[object], *, windowed: bool) -> _Span:
    held_from, held = span.held(windowed=windowed)
    runs, parents_at = torch.tensor(held), None
    kept.append(runs)
    if span.parents is not None:
        parents = torch.tensor(span.parents)
        kept.append(parents)
        parents_at = parents.data_ptr()
    return _Span(first_row, len(span.tokens), span.start, held_from, len(held), runs.data_ptr(), parents_at)


def _verb(loaded: ctypes.CDLL, name: str, returns: type[ctypes.c_int] | None, takes: list[Any]) -> Callable[..., Any]:
    function: Callable[..., Any] = loaded[name]
    function.restype, function.argtypes = returns, takes  # type: ignore[attr-defined]
    return function
