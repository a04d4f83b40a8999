"""Attention of many rows by FlashInfer (Ye et al., arXiv 2501.01005), where it is installed and does better than ours.

It attends chains to keys in pages; a page of it is a slot of ours, so that a text may lie in whatever slots. Where it
has no kernel (trees, sinks, chunks, caches in 8 bits, shards of which one kv head is read by fewer query heads than
another), and where scores are capped, ours serve. Before the first round it is tried beside them on random numbers: it
must give the same in less time, or is left, and that is told. Must not know what rows mean. Imported on cards only.
"""

from __future__ import annotations

import logging
from functools import cache
from itertools import accumulate
from statistics import median
from threading import get_ident
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tpspec.cache.store import Kept, KVStore
from tpspec.model.batch import Span
from tpspec.model.sight import Heads
from tpspec.staged import sent
from tpspec.switches import OFF, switch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from tpspec.cache.store import Cells
    from tpspec.model.batch import Runs
    from tpspec.model.card.steps import CardSteps
    from tpspec.model.sight import Shape, Sight

log = logging.getLogger(__name__)

SWITCH = "TPSPEC_FLASHINFER"  # variable: "off" where it should not be tried
DIMS = (64, 128, 256)  # of heads
WORKSPACE = 128 << 20  # bytes, as FlashInfer asks for
CACHED, ROWS = 8192, 256  # of the trial
CLOSE = 2**-6  # to what is largest
TIMES, CALLS = 5, 10  # in a row: a call alone would be as long as its launch
Wrapper = Any  # flashinfer.BatchPrefillWithPagedKVCacheWrapper


class Flash:
    """Of one model. make: a wrapper of paged attention."""

    def __init__(self, shape: Shape, make: Callable[[Tensor, str], Wrapper]) -> None:
        self._shape, self.serves = shape, False
        self._wrappers = {sight: make(_workspace(shape.device, get_ident()), "HND") for sight in shape.sights}
        self._planned = torch.cuda.Event() if shape.device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def begin(self, spans: Sequence[Span]) -> None:
        """The rows of one forward, which it serves if they are chains."""
        self.serves = bool(spans) and all(span.num_chained() == len(span.tokens) for span in spans)
        if not self.serves:
            return
        if self._planned is not None:
            self._planned.synchronize()  # what it has planned it sends from where it plans next
        for sight, wrapper in self._wrappers.items():
            self._plan(sight, wrapper, spans)
        if self._planned is not None:
            self._planned.record()

    def attended(self, sight: Sight, keys: Cells, values: Cells, q_TX: Tensor) -> Tensor:
        """[T, H * E], as of CardSteps."""
        pages = tuple(cells.numbers_GSE.transpose(0, 1).unsqueeze(2) for cells in (keys, values))
        q_THE = q_TX.view(len(q_TX), sight.heads.num, sight.heads.dim)
        out_THE: Tensor = self._wrappers[sight].run(q_THE, pages, out=torch.empty_like(q_THE))
        return out_THE.flatten(1)

    def _plan(self, sight: Sight, wrapper: Wrapper, spans: Sequence[Span]) -> None:
        """What is the same for all layers of that sight. All but pages is read on the host."""
        heads, held = sight.heads, [span.held(windowed=sight.is_windowed)[1] for span in spans]
        pages = sent(torch.from_numpy(np.concatenate([_slots(runs) for runs in held])), self._shape.device)
        wrapper.plan(
            _ends(len(span.tokens) for span in spans), _ends(sum(count for _, count in runs) for runs in held),
            pages, torch.ones(len(held), dtype=torch.int32), heads.num, heads.num_kv, heads.dim, 1, causal=True,
            sm_scale=self._shape.score_scale, window_left=-1 if sight.window is None else sight.window - 1,
            q_data_type=self._shape.dtype,
        )  # fmt: skip


def has_kernels(shape: Shape) -> bool:
    """Whether FlashInfer is wanted, installed, and has kernels for such heads."""
    if switch(SWITCH) == OFF or shape.dtype.itemsize != 2 or shape.score_cap is not None:
        return False
    even = (Heads.of(range(heads.num), heads.num // heads.num_kv, heads.dim) for heads in shape.heads)
    if any(sight.chunked for sight in shape.sights):
        return False
    if shape.heads != {*even} or any(heads.dim not in DIMS for heads in shape.heads):
        return False
    try:
        import flashinfer  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "flashinfer":
            log.warning("prompts do not go through FlashInfer, which is not installed as it should be: %s", error)
        return False
    return True


def flash(shape: Shape, ours: Callable[[KVStore], CardSteps]) -> Flash | None:
    """Where it does better than what `ours` makes for a cache. It has kernels for the shape."""
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    log.info("FlashInfer is tried: what it has not compiled yet it compiles now")
    try:
        made = Flash(shape, BatchPrefillWithPagedKVCacheWrapper)
        fault = _fault(shape, made, ours)
    except Exception as error:  # noqa: BLE001  kernels of others, which it compiles now: whatever fails, ours serve
        fault = f"{type(error).__name__}: {error}"
    if fault is None:
        return made
    log.warning("prompts do not go through FlashInfer: %s", fault)
    return None


@cache
def _workspace(device: torch.device, thread: int) -> Tensor:
    """For all models of a thread: what is in it is of one call. A drafter beside a shard calls at the same time."""
    return torch.empty(WORKSPACE, dtype=torch.uint8, device=device)


def _fault(shape: Shape, made: Flash, ours: Callable[[KVStore], CardSteps]) -> str | None:
    """Why it does not do better: of chunks of two prompts behind many tokens, one of which lies in pieces, in layers of
    every sight."""
    sights, size, half = list(shape.sights), CACHED + ROWS, (CACHED + ROWS) // 2
    kept = {layer: Kept(sight.heads.num_kv, sight.heads.dim) for layer, sight in enumerate(sights)}
    store = KVStore(kept, size, shape.dtype, shape.device)
    for cells in store.cells:
        cells.numbers_GSE.normal_()
    tokens, start = (0,) * (ROWS // 2), half - ROWS // 2
    scattered = ((size - half // 3, half // 3), (half, half - half // 3))
    spans, steps = [Span(0, start, tokens, ((0, half),), 1), Span(1, start, tokens, scattered, 1)], ours(store)
    steps.begin(spans, ROWS)
    made.begin(spans)
    own_s = its_s = 0.0
    for layer, sight in enumerate(sights):
        q_TX = torch.randn(ROWS, sight.heads.num * sight.heads.dim, device=shape.device).to(shape.dtype)
        expected, seconds = _timed(lambda: steps.attended(sight, layer, None, q_TX), shape.device)  # noqa: B023
        own_s += seconds
        keys, values = store.keys[layer], store.values[layer]
        told, seconds = _timed(lambda: made.attended(sight, keys, values, q_TX), shape.device)  # noqa: B023
        its_s += seconds
        if not (told - expected).abs().max() <= CLOSE * expected.abs().max():
            return f"it computes something else ({sight})"
    return None if its_s < own_s else f"it takes {its_s / own_s:.2f} times as long as our own kernel"


def _timed(work: Callable[[], Tensor], device: torch.device) -> tuple[Tensor, float]:
    """What it gives, and the median of its seconds once it has run."""
    made, seconds = work(), []
    for _ in range(TIMES):
        _wait(device)
        begun = perf_counter()
        for _ in range(CALLS):
            work()
        _wait(device)
        seconds.append((perf_counter() - begun) / CALLS)
    return made, median(seconds)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _slots(runs: Runs) -> NDArray[np.int32]:
    firsts, counts = np.array(runs, dtype=np.int32).T
    ends = counts.cumsum(dtype=np.int32)
    slots: NDArray[np.int32] = np.arange(ends[-1], dtype=np.int32) + (firsts - ends + counts).repeat(counts)
    return slots


def _ends(counts: Iterable[int]) -> Tensor:
    return torch.tensor([*accumulate(counts, initial=0)], dtype=torch.int32)
