"""Linear attention and short convolutions of few rows on a CPU, by `delta` and `convolved` of rows.c; this is their
other side. Must not know what rows mean."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import torch

from tpspec.model.courses import courses

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from tpspec.cache.states import StateStore
    from tpspec.model.batch import Span
    from tpspec.model.courses import Course
    from tpspec.model.delta_net import Made, Mixer
    from tpspec.model.layers import ConvLayer, LinearLayer
    from tpspec.model.short_conv import GatedConv

MOST_SIGHT = 8  # rows that a convolution sees
INT, POINTER, FLOAT = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float


class _Delta(ctypes.Structure):
    """`Delta` of rows.c: of one layer."""

    _fields_ = [("num_keys", INT), ("num_values", INT), ("key_dim", INT), ("value_dim", INT), ("num_decays", INT),
                ("num_before", INT), ("length", INT), ("num_left", INT), ("key_of", POINTER), ("kernel", POINTER),
                ("decays", POINTER), ("biases", POINTER), ("norm", POINTER), ("skips", POINTER),
                ("conv_biases", POINTER), ("eps", FLOAT), ("most_written", FLOAT), ("states", POINTER),
                ("left", POINTER)]  # fmt: skip

    @classmethod
    def of(cls, mixer: Mixer, store: StateStore, layer: int) -> _Delta:
        sizes, held = store.sizes, store.of(layer)
        weight, eps = (None, 0.0) if mixer.norm is None else (mixer.norm.weight, mixer.norm.eps)
        return cls(
            mixer.num_keys, sizes.num_heads, sizes.key_dim, sizes.value_dim, len(mixer.biases_F) // sizes.num_heads,
            sizes.num_before, store.length, store.num_rows, mixer.key_of.data_ptr(), mixer.kernel.data_ptr(),
            mixer.decays_H.data_ptr(), mixer.biases_F.data_ptr(),
            *(None if x is None else x.data_ptr() for x in (weight, mixer.skips_H, mixer.conv_biases_M)), eps,
            mixer.most_written, held.states.data_ptr(), held.left.data_ptr(),
        )  # fmt: skip


class _Conv(ctypes.Structure):
    """`Conv` of rows.c: of one layer."""

    _fields_ = [("width", INT), ("num_before", INT), ("length", INT), ("num_left", INT), ("kernel", POINTER),
                ("biases", POINTER), ("left", POINTER)]  # fmt: skip

    @classmethod
    def of(cls, conv: GatedConv, store: StateStore, layer: int) -> _Conv:
        biases = None if conv.biases_M is None else conv.biases_M.data_ptr()
        return cls(store.sizes.row, store.sizes.num_before, store.length, store.num_rows, conv.kernel.data_ptr(),
                   biases, store.of(layer).left.data_ptr())  # fmt: skip


class _Course(ctypes.Structure):
    """`Course` of rows.c."""

    _fields_ = [("slot", INT), ("is_fresh", INT), ("num_kept", INT), ("first", INT), ("num_chained", INT),
                ("num_rows", INT), ("parents", POINTER), ("sights", POINTER), ("before", POINTER)]  # fmt: skip

    @classmethod
    def of(cls, course: Course, kept: list[object]) -> _Course:
        lists = [torch.tensor(ints) for ints in (course.parents, course.sights, course.before)]
        made = cls(course.slot, course.is_fresh, course.num_kept, course.rows.start, course.num_chained,
                   len(course.rows), *(ints.data_ptr() for ints in lists))  # fmt: skip
        kept += [*lists, made]
        return made


class CompiledStates:
    """Of one model. delta, convolved: the verbs of rows.c, for the dtype of its rows."""

    def __init__(self, store: StateStore, delta: Callable[..., Any], convolved: Callable[..., Any]) -> None:
        self._store, self._delta, self._convolved = store, delta, convolved
        self._layers: dict[int, _Delta | _Conv] = {}

    def courses(self, spans: Sequence[Span], kept: list[object]) -> list[int]:
        """Addresses of the spans' courses, which point at what goes into `kept`."""
        return [ctypes.addressof(_Course.of(course, kept)) for course in courses(spans, self._store)]

    def linear_attention(self, layer: LinearLayer, made: Made, courses: list[int], out_TX: Tensor) -> None:
        """See `Steps`; into out [T, H V], but for padding."""
        if layer.index not in self._layers:
            self._layers[layer.index] = _Delta.of(layer.mixer, self._store, layer.index)
        at = ctypes.addressof(self._layers[layer.index])
        *products, squares_T = made
        addresses = [x.data_ptr() for x in (*products, out_TX)]
        squares = None if squares_T is None else squares_T.data_ptr()
        for course in courses:
            if self._delta(at, course, *addresses, squares):
                raise MemoryError("linear attention found no memory for its rows")

    def convolved(self, layer: ConvLayer, made_TX: Tensor, courses: list[int], out_TM: Tensor) -> None:
        """See `Steps`; into out [T, M], but for padding."""
        if layer.index not in self._layers:
            self._layers[layer.index] = _Conv.of(layer.mixer, self._store, layer.index)
        at = ctypes.addressof(self._layers[layer.index])
        for course in courses:
            self._convolved(at, course, made_TX.data_ptr(), out_TM.data_ptr())
