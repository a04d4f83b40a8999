"""A CUDA card made of the CPU: tensors say they are on it, and it is as strict as one about where numbers are.

What computes on it is torch on the CPU, and Triton's interpreter for kernels. What a card refuses is refused: a product
of a matrix on the card with one on the host, a wait inside a recording. What makes the host wait is told by the warning
torch gives (`set_sync_debug_mode`). A recording holds operations with the very numbers and addresses they had, as a
CUDA graph does, and does them again, so that what should have changed from round to round and was no tensor is found.
What it does not show: that kernels compile and how, the order of streams, what is overwritten too early, speed.
"""

from __future__ import annotations

import ctypes
import subprocess
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from tpspec.staged import Fetched
from tpspec.verify import shards

CARD = torch.device("cuda", 0)
CPU = torch.device("cpu")
PROPERTIES = SimpleNamespace(
    name="an emulated card",
    multi_processor_count=2,
    total_memory=24 << 30,
    uuid="emulated",
    is_integrated=0,
    L2_cache_size=50 << 20,
)
CAPABILITY = (8, 6)
MEMORY = (20 << 30, 24 << 30)
WAITING = "called a synchronizing CUDA operation"
WAITS_FOR_EVER = "the host waits for a card that waits for the host"

aten = torch.ops.aten
COPIES = {aten.copy_, aten.to, aten._to_copy}
INDEXED = {aten.index, aten.index_put, aten.index_put_}
WAITS = {aten._local_scalar_dense, aten.item, aten.is_nonzero, aten.equal, aten.nonzero, aten.masked_select}
WAITS |= {aten._unique2, aten.unique_consecutive, aten.bincount, aten.nonzero_numpy, aten.allclose}
ROOM = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}


class OnCard(torch.Tensor):
    """A tensor on the card. inside: its numbers, on the host."""

    inside: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    @torch.inference_mode(False)
    def __new__(cls, x: torch.Tensor) -> OnCard:
        size = x.shape, x.stride(), x.storage_offset()
        made: OnCard = torch.Tensor._make_wrapper_subclass(cls, *size, dtype=x.dtype, device=CARD)
        made.inside = x
        if running is not None:
            running.hold(made)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert running is not None, "the card has gone"
        return running.run(func, args, kwargs or {})

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(_indices(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_indices(index), value)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def data_ptr(self) -> int:
        raise AssertionError("an address on the card is of no use to the host")

    def __repr__(self, **_: Any) -> str:
        return f"OnCard({self.inside!r})"


class Mode(TorchDispatchMode):
    """Hands what a thread asks of torch to the card."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert running is not None, "the card has gone"
        return running.run(func, args, kwargs or {})


class Recording:
    """In place of torch.cuda.CUDAGraph. kernels: of Triton, by name. priority: of the stream it was recorded in."""

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []
        self.kernels: list[str] = []
        self.priority = 0
        self._is_there = False  # on the card, to which the first replay brings it

    def replay(self) -> None:
        assert running is not None, "the card has gone"
        assert self.work, "nothing was recorded, or it was forgotten"
        running.replays += self._is_there
        if (held := running.held_back()) is not None:
            assert self._is_there, "what brings a recording to the card may wait for what waits at the gate"
            held.work.append(self._again)
        else:
            self._again()
        self._is_there = True

    @torch.inference_mode()
    def _again(self) -> None:
        for one in self.work:
            one()

    def reset(self) -> None:
        self.work.clear()


class Event:
    """In place of torch.cuda.Event."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._at, self._behind = 0.0, None

    def record(self, stream: object = None) -> None:
        self._at, self._behind = perf_counter(), None if running is None else running.held_back()

    def synchronize(self) -> None:
        assert self._behind is None or self._behind.is_open, WAITS_FOR_EVER

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return 1000 * (end._at - self._at)


class Verdict(Fetched):
    """What the host waits for in the end, though it may do something else meanwhile. Torch does not know of it."""

    def here(self) -> torch.Tensor:
        if self._copied is not None and running is not None:
            assert running.recording is None, "a wait inside a recording"
            running.waits.append("a verdict on its way from the card")
        return super().here()


class Stream:
    """In place of torch.cuda.Stream: everything is done at once, in the order in which it is asked for."""

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.priority = priority

    def wait_stream(self, other: Stream) -> None: ...
    def synchronize(self) -> None: ...


@dataclass
class Held:
    """What a thread has asked of the card behind a gate that its host has not opened yet (card_words.py)."""

    opened: torch.Tensor
    passed: torch.Tensor
    work: list[Callable[[], None]]

    @property
    def is_open(self) -> bool:
        return bool(self.opened[0] > self.passed[0])


@dataclass
class Card:
    """launches: operations that no replay did; a view is none, nor is room that is made. replays: of recordings, beside
    the first of each. waits: of the host, why. held: bytes of its memory that are in use; most_held: since that was set
    last. What a recording has made stays in use."""

    launches: int = 0
    replays: int = 0
    waits: list[str] = field(default_factory=list)
    tells_waits: bool = False
    computes: bool = True  # or its kernels do nothing, and what is left for them to write is zero
    in_thread: threading.local = field(default_factory=threading.local)
    one_at_a_time: Any = field(default_factory=threading.Lock)  # Triton's interpreter knows one thread
    pinned: list[torch.Tensor] = field(default_factory=list)  # kept, so that no address of one is another's
    held: int = 0
    most_held: int = 0
    _users: Counter[tuple[int, int]] = field(default_factory=Counter)  # tensors of a piece of memory, by where and size
    _watched: dict[int, weakref.ref[OnCard]] = field(default_factory=dict)

    @property
    def recording(self) -> Recording | None:
        """Of this thread."""
        return getattr(self.in_thread, "recording", None)

    def held_back(self) -> Held | None:
        """What this thread's work has to wait behind. Who has opened the gate has it done: at the latest when he asks
        for anything else."""
        held: Held | None = getattr(self.in_thread, "held", None)
        if held is None or not held.is_open:
            return held
        self.in_thread.held = None
        for one in held.work:
            one()
        return None

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        flat, _ = tree_flatten((args, kwargs))
        on_card = [x for x in flat if isinstance(x, OnCard)]
        devices = [x for x in flat if isinstance(x, torch.device)]
        pins = kwargs.pop("pin_memory", False)
        if not on_card and all(device.type != "cuda" for device in devices):
            made = func(*args, **kwargs)
            if pins:
                self.pinned.append(made)
            return made
        assert self.held_back() is None, WAITS_FOR_EVER
        self._check(getattr(func, "overloadpacket", func), func, args, kwargs, flat)
        given = {id(x.inside): x for x in on_card}
        args, kwargs = tree_map(_inside, (args, kwargs))
        made = func(*args, **kwargs)
        if not self.computes and getattr(func, "overloadpacket", None) in ROOM:
            made.zero_()
        self._launched(func, args, kwargs, made)
        to_card = not devices or devices[0].type == "cuda"

        def told(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            if not to_card:
                return x.clone() if id(x) in given else x
            if id(x) in given:
                return given[id(x)]
            return OnCard(x.clone() if any(x is y for y in flat) else x)  # no memory is on both sides

        return tree_map(told, made)

    def hold(self, x: OnCard) -> None:
        """Until nobody has a tensor of that memory."""
        memory, number = (_address(x.inside), x.inside.untyped_storage().nbytes()), id(x)

        def let_go(_: object) -> None:
            del self._watched[number]
            self._users[memory] -= 1
            if not self._users[memory]:
                self.held -= memory[1]

        if not self._users[memory]:
            self.held += memory[1]
            self.most_held = max(self.most_held, self.held)
        self._users[memory] += 1
        self._watched[number] = weakref.ref(x, let_go)

    def launch(self, name: str, kernel: Callable[..., None], args: Any, kwargs: dict[str, Any]) -> None:
        """Of Triton's."""
        assert self.held_back() is None, WAITS_FOR_EVER
        flat, _ = tree_flatten((args, kwargs))
        assert self.is_reached(flat), "Pointer argument cannot be accessed"
        args, kwargs = tree_map(_inside, (args, kwargs))

        def work() -> None:
            if not self.computes:
                return
            with self.one_at_a_time:
                kernel(*args, **kwargs)

        self.launches += 1
        if name == "wait_for" and not (held := Held(*args, [work])).is_open:
            self.in_thread.held = held
            return
        work()
        if self.recording is not None:
            self.recording.work.append(work)
            self.recording.kernels.append(name)

    @contextmanager
    def record(
        self, recording: Recording, pool: object = None, stream: Stream | None = None, capture_error_mode: str = ""
    ) -> Iterator[None]:
        """In place of torch.cuda.graph."""
        assert self.recording is None, "one recording at a time"
        self.in_thread.recording = recording
        recording.priority = stream.priority if stream is not None else 0
        try:
            yield
        finally:
            self.in_thread.recording = None

    def wait(self, why: str) -> None:
        if self.recording is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing: {why}")
        self.waits.append(why)
        if self.tells_waits:
            warnings.warn(f"{WAITING}: {why}", stacklevel=4)

    def _check(self, what: Any, func: Any, args: Any, kwargs: dict[str, Any], flat: list[Any]) -> None:
        """Refuses what a card refuses, and tells what waits."""
        if what in WAITS or (what is aten.repeat_interleave and kwargs.get("output_size") is None):
            self.wait(str(func))
        if what in COPIES:
            self._check_copy(func, args, kwargs, flat)
        elif what in INDEXED:
            self._check_index(func, *args)
        elif wide := [x for x in flat if _is_on_host(x) and x.dim()]:
            raise RuntimeError(f"Expected all tensors to be on the same device: {func}, {wide[0].shape} on the host")

    def _check_copy(self, func: Any, args: Any, kwargs: dict[str, Any], flat: list[Any]) -> None:
        sides = {x.type for x in flat if isinstance(x, torch.device)}
        sides |= {x.device.type for x in flat if isinstance(x, torch.Tensor)}
        if len(sides) == 1:
            return
        is_queued = bool(kwargs.get("non_blocking")) or (func is aten.copy_.default and args[2:3] == (True,))
        if not is_queued or (self.recording is not None and not self.is_reached(flat)):
            self.wait(f"{func} between host and card")

    def is_reached(self, flat: list[Any]) -> bool:
        """Whether every tensor of them is on the card, or in memory that is pinned."""
        pinned = set(map(_address, self.pinned))
        return all(_address(x) in pinned for x in flat if _is_on_host(x))

    def _check_index(self, func: Any, x: torch.Tensor, index: Any, value: Any = None, *_: Any) -> None:
        for one in index:
            if isinstance(one, OnCard) and _is_on_host(x):
                raise RuntimeError(f"indices should be on the same device as the indexed tensor: {func}")
            if _is_on_host(one) and one.dim():
                self.wait(f"{func} by an index of the host")
            if isinstance(one, torch.Tensor) and one.dtype in (torch.bool, torch.uint8):
                self.wait(f"{func} by a mask")
        if isinstance(value, torch.Tensor) and _is_on_host(value) is not _is_on_host(x):
            self.wait(f"{func} of what is elsewhere")  # a number, too

    def _launched(self, func: Any, args: Any, kwargs: dict[str, Any], made: Any) -> None:
        self.launches += not (func.is_view or func.overloadpacket in ROOM)
        if self.recording is None:
            return

        def again() -> None:
            for old, new in zip(tree_flatten(made)[0], tree_flatten(func(*args, **kwargs))[0], strict=True):
                if isinstance(old, torch.Tensor) and old is not new:
                    old.copy_(new)

        self.recording.work.append(again)


def _inside(x: Any) -> Any:
    if isinstance(x, OnCard):
        return x.inside
    return CPU if isinstance(x, torch.device) else x


def _indices(index: Any) -> Any:
    """Lists as what torch makes of them first, tensors on the host."""
    if isinstance(index, tuple):
        return tuple(_indices(one) for one in index)
    return torch.tensor(index, dtype=None if index else torch.int64) if isinstance(index, list) else index


def _is_on_host(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and not isinstance(x, OnCard)


def _address(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


running: Card | None = None


@contextmanager
def emulated_card(*, computes: bool = True) -> Iterator[Card]:
    """While it lasts torch has one card, also in threads that begin meanwhile. computes: see `Card`."""
    global running
    from triton.runtime.interpreter import GridExecutor

    assert running is None, "there is one already"
    _guard()
    running = card = Card(computes=computes)
    launched, ran = GridExecutor.__call__, threading.Thread.run

    def launch(grid: Any, *args: Any, **kwargs: Any) -> None:
        card.launch(grid.fn.__name__, lambda *args, **kwargs: launched(grid, *args, **kwargs), args, kwargs)

    def run(thread: threading.Thread) -> None:
        with Mode():
            ran(thread)

    def tell_waits(mode: str) -> None:
        card.tells_waits = mode == "warn"

    def elsewhere(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Torch without CUDA makes a tensor of Python's numbers on the host only."""
        return lambda data, *, device=None, **kwargs: (
            make(data, **kwargs) if device is None else make(data, **kwargs).to(device)
        )

    cuda: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_capability": lambda device=None: CAPABILITY,
        "get_device_properties": lambda device=None: PROPERTIES,
        "get_device_name": lambda device=None: PROPERTIES.name,
        "mem_get_info": lambda device=None: MEMORY,
        "memory_allocated": lambda device=None: card.held,
        "memory_reserved": lambda device=None: card.held,
        "max_memory_allocated": lambda device=None: card.most_held,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "Event": Event,
        "Stream": Stream,
        "current_stream": lambda device=None: getattr(card.in_thread, "stream", Stream()),
        "set_stream": lambda stream: setattr(card.in_thread, "stream", stream),
        "stream": lambda stream: ExitStack(),
        "CUDAGraph": Recording,
        "graph": card.record,
        "graph_pool_handle": lambda: (0, 0),
        "is_current_stream_capturing": lambda: card.recording is not None,
        "set_sync_debug_mode": tell_waits,
    }
    with ExitStack() as stack:
        for name, stand_in in cuda.items():
            stack.enter_context(patch.object(torch.cuda, name, stand_in))
        stack.enter_context(patch.object(GridExecutor, "__call__", launch))
        stack.enter_context(patch.object(threading.Thread, "run", run))
        stack.enter_context(patch.object(shards, "Fetched", Verdict))
        for make in (torch.tensor, torch.as_tensor):
            stack.enter_context(patch.object(torch, make.__name__, elsewhere(make)))
        stack.callback(_gone)
        stack.enter_context(Mode())
        yield card


@cache
def _guard() -> ctypes.CDLL:
    """Torch without CUDA asks nobody which card is current; now it asks a stand-in of its own."""
    torch_at = Path(torch.__file__).parent
    with TemporaryDirectory() as folder:
        source, library = Path(folder, "guard.cpp"), Path(folder, "guard.so")
        source.write_text(
            "#include <c10/core/impl/FakeGuardImpl.h>\n"
            "C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::FakeGuardImpl<c10::DeviceType::CUDA>)\n"
        )
        where = [f"-I{torch_at / 'include'}", f"-L{torch_at / 'lib'}", "-lc10"]
        subprocess.run(["c++", "-std=c++20", "-shared", "-fPIC", source, "-o", library, *where], check=True)
        return ctypes.CDLL(str(library))


def _gone() -> None:
    global running
    running = None
