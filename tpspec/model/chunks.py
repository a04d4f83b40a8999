"""Attention of many rows on a CPU, in C (chunks.c), through ctypes: attention.py's `fused` in half the time.

Must not know what rows mean.

Shapes: G kv heads, R folded rows, S keys in view, E head dim.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from tpspec.native import library

if TYPE_CHECKING:
    from torch import Tensor

    from tpspec.model.attention import Attend
    from tpspec.model.sight import Shape

LIBRARY = "tpspec.model._chunks"
VERSION = 4  # of chunks.c
LANES = 16
MOST_DIM = 576
DTYPES = (torch.bfloat16, torch.float32)
INT, POINTER, FLOAT = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float


class _Call(ctypes.Structure):
    """`Call` of chunks.c."""

    _fields_ = [("is_bfloat16", INT), ("num_heads", INT), ("num_rows", INT), ("num_keys", INT), ("dim", INT),
                ("key_stride", INT), ("value_stride", INT), ("q", POINTER), ("keys", POINTER), ("values", POINTER),
                ("mask", POINTER), ("sinks", POINTER), ("out", POINTER), ("scale", FLOAT),
                ("cap", FLOAT)]  # fmt: skip


class CompiledAttend:
    """An `Attend` for bfloat16 or float32 and heads of 16, 32 ... 576 numbers. A row's bits depend on no other row."""

    def __init__(self, loaded: ctypes.CDLL) -> None:
        self._attend = loaded.attend
        self._attend.restype, self._attend.argtypes = None, [POINTER, INT]

    def __call__(
        self, q_GRE: Tensor, k_GSE: Tensor, v_GSE: Tensor, mask_RS: Tensor | None, scale: float,
        sinks_GR: Tensor | None = None, cap: float | None = None,
    ) -> Tensor:  # fmt: skip
        q_GRE, k_GSE, v_GSE = q_GRE.contiguous(), _in_lines(k_GSE), _in_lines(v_GSE)
        if mask_RS is not None:
            mask_RS = mask_RS.to(q_GRE.dtype).contiguous()
        if sinks_GR is not None:
            sinks_GR = sinks_GR.contiguous()
        G, R, E = q_GRE.shape
        out_GRE = torch.empty_like(q_GRE)
        call = _Call(
            q_GRE.dtype == torch.bfloat16, G, R, k_GSE.shape[1], E, k_GSE.stride(0), v_GSE.stride(0), q_GRE.data_ptr(),
            k_GSE.data_ptr(), v_GSE.data_ptr(), None if mask_RS is None else mask_RS.data_ptr(),
            None if sinks_GR is None else sinks_GR.data_ptr(), out_GRE.data_ptr(), scale, cap or 0.0,
        )  # fmt: skip
        self._attend(ctypes.addressof(call), torch.get_num_threads())
        return out_GRE


def compiled_attend(shape: Shape) -> Attend | None:
    """Where there is a library for this machine and the shape is one of its."""
    if shape.device.type != "cpu" or shape.dtype not in DTYPES:
        return None
    if any(heads.dim % LANES or heads.dim > MOST_DIM for heads in shape.heads):
        return None
    loaded = library(LIBRARY)
    return CompiledAttend(loaded) if loaded is not None and loaded.chunks_version() == VERSION else None


def _in_lines(x_GSE: Tensor) -> Tensor:
    """With the keys of a head one after another, as they are in a cache; a copy if need be."""
    return x_GSE if x_GSE.stride()[1:] == (x_GSE.shape[2], 1) else x_GSE.contiguous()
