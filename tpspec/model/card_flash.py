"""Attention of many rows by FlashInfer (Ye et al., arXiv 2501.01005), where it is installed and does better than ours.

It attends chains to keys in pages; a page of it is a slot of ours, so that a text may lie in whatever slots. Where it
has no kernel (trees, sinks, caches in 8 bits, shards of which one kv head is read by fewer query heads than another)
ours serve. Before the first round it is tried beside them on random numbers: it must give the same in less time, or is
left, and that is told. Must not know what rows mean. Imported on cards only.
"""

from __future__ import annotations

import logging
import os
from itertools import accumulate
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from tpspec.cache.store import Kept, KVStore
from tpspec.model.batch import Span

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from tpspec.cache.store import Cells
    from tpspec.model.card_steps import CardSteps
    from tpspec.model.steps import Shape, Sight

log = logging.getLogger(__name__)

SWITCH = "TPSPEC_FLASHINFER"  # variable: "off" where it should not be tried
DIMS = (64, 128, 256)  # of heads
WORKSPACE = 128 << 20  # bytes, as FlashInfer asks for
CACHED, ROWS = 2048, 256  # of the trial
CLOSE = 2**-6  # to what is largest
TIMES = 5


class Flash:
    """Of one model. make: FlashInfer's wrapper of paged attention."""

    def __init__(self, shape: Shape, make: Callable[..., Any]) -> None:
        self._shape = shape
        workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=shape.device)
        self._wrappers = {sight: make(workspace, "HND") for sight in shape.sights}
        self._spans: Sequence[Span] = ()
        self._planned: set[Sight] = set()

    def begin(self, spans: Sequence[Span]) -> None:
        """The rows of one forward."""
        are_chains = all(span.num_chained() == len(span.tokens) for span in spans)
        self._spans = spans if are_chains else ()
        self._planned.clear()

    @property
    def serves(self) -> bool:
        return bool(self._spans)

    def attended(self, sight: Sight, keys: Cells, values: Cells, q_TX: Tensor) -> Tensor:
        """[T, H * E], as of CardSteps."""
        if sight not in self._planned:
            self._plan(sight)
        pages = tuple(cells.numbers_GSE.transpose(0, 1).unsqueeze(2) for cells in (keys, values))
        q_THE = q_TX.view(len(q_TX), sight.heads.num, sight.heads.dim)
        out_THE: Tensor = self._wrappers[sight].run(q_THE, pages)
        return out_THE.flatten(1)

    def _plan(self, sight: Sight) -> None:
        """What is the same for all layers of that sight."""
        held = [span.held(windowed=sight.is_windowed)[1] for span in self._spans]
        slots = [slot for runs in held for first, count in runs for slot in range(first, first + count)]
        rows = accumulate((len(span.tokens) for span in self._spans), initial=0)
        keys = accumulate((sum(count for _, count in runs) for runs in held), initial=0)
        pages = _integers(slots)
        if self._shape.device.type == "cuda":
            pages = pages.pin_memory()  # or the host would wait until so many have gone
        in_last_pages = _integers([1] * len(held))
        self._wrappers[sight].plan(
            _integers([*rows]), _integers([*keys]), pages, in_last_pages, sight.heads.num, sight.heads.num_kv,
            sight.heads.dim, 1, causal=True, sm_scale=self._shape.score_scale, q_data_type=self._shape.dtype,
            window_left=-1 if sight.window is None else sight.window - 1,
        )  # fmt: skip
        self._planned.add(sight)


def flash(shape: Shape, ours: Callable[[KVStore], CardSteps]) -> Flash | None:
    """Where it is installed, has kernels for the shape, and does better than what `ours` makes for a cache."""
    if os.environ.get(SWITCH, "on") == "off" or not _has_kernels(shape):
        return None
    try:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper
    except ModuleNotFoundError as error:
        if error.name != "flashinfer":
            log.warning("prompts do not go through FlashInfer, which is not installed as it should be: %s", error)
        return None
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


def _has_kernels(shape: Shape) -> bool:
    even = all(heads.kv_of == tuple(h * heads.num_kv // heads.num for h in range(heads.num)) for heads in shape.heads)
    return even and shape.dtype.itemsize == 2 and all(heads.dim in DIMS for heads in shape.heads)


def _fault(shape: Shape, made: Flash, ours: Callable[[KVStore], CardSteps]) -> str | None:
    """Why it does not do better: of a chunk of a prompt behind many tokens, in layers of every sight."""
    sights, size = list(shape.sights), CACHED + ROWS
    kept = {layer: Kept(sight.heads.num_kv, sight.heads.dim) for layer, sight in enumerate(sights)}
    store = KVStore(kept, size, shape.dtype, shape.device)
    for cells in store.cells:
        cells.numbers_GSE.normal_()
    spans, steps = [Span(0, CACHED, (0,) * ROWS, ((0, size),), 1)], ours(store)
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
        work()
        _wait(device)
        seconds.append(perf_counter() - begun)
    return made, median(seconds)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _integers(numbers: list[int]) -> Tensor:
    """On the host, whence FlashInfer takes them itself."""
    return torch.tensor(numbers, dtype=torch.int32)
