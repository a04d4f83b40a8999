"""Triton's interpreter, made quicker where no card is: what it computes is as it was.

At every call of a function by a kernel it looks through all of Triton's language for what it has to replace, where all
has been replaced when the kernel was launched, and what that is was known from the first time. Of every sum and product
it asks whether it overflows, and does not look at the answer, which only its debugging does. And it makes the same
table of types, and the same type and shape, again for every tensor. Most of the time of tests of kernels.

And it learns what bfloat16 is in a product, or made of an integer: it has them as integers, and takes those. And what
Gluon says, which is Triton's language and where numbers lie, of which it knows nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any

import numpy as np


def hurry() -> None:
    """From now on."""
    # The first launch imports it, perhaps of a test that says that there is no interpreter: then that fails.
    import triton.experimental.gluon  # noqa: F401
    from triton.runtime import interpreter

    builder: Any = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    find, found = interpreter._get_np_dtype, dict[str, Any]()

    def found_once(type: Any) -> Any:
        if type.name not in found:
            found[type.name] = find(type)
        return found[type.name]

    interpreter._get_np_dtype = found_once
    _look_once()
    _know_types()
    _learn_bfloat16()
    _learn_gluon()


def _look_once() -> None:
    """Once and for all, for each of the modules that functions know the language by: no launch restores what was there.
    What is replaced knows the interpreter without asking whether who calls it has named another."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch, nothing_to_restore = interpreter._patch_lang, interpreter._LangPatchScope()
    replaced = set[frozenset[str]]()

    @cache
    def known_by(function: Callable[..., Any]) -> frozenset[str]:
        known = function.__globals__.values()
        return frozenset(module.__name__ for module in (tl, tl.core) if any(one is module for one in known))

    def replace_once(function: Callable[..., Any]) -> Any:
        if known_by(function) not in replaced:
            replaced.add(known_by(function))
            patch(function)
        return nothing_to_restore

    def replace(namespace: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        asked = getattr(member, "__wrapped__", member)

        def interpreted(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return asked(*args, **kwargs)

        setattr(namespace, name, interpreted)

    interpreter._patch_lang, interpreter._patch_attr = replace_once, replace


def _know_types() -> None:
    """What a type is, and a tensor of it has, is made once, and shapes that are alike need no broadcast."""
    import triton.language as tl
    from triton.language.semantic import TritonSemantic

    core: Any = tl.core
    make_type, broadcast = core.block_type.__init__, TritonSemantic.broadcast_impl_value
    types = dict[tuple[Any, ...], tuple[Any, ...]]()

    def block_type(self: Any, element: Any, shape: Any) -> None:
        sizes = shape.values if isinstance(shape, core.tuple) else shape
        key = (element.name, *[size.value if isinstance(size, core.constexpr) else size for size in sizes])
        if key not in types:
            make_type(self, element, shape)
            types[key] = element, self.shape, self.numel, self.name, _of_tensors(self)
        self.element_ty, self.shape, self.numel, self.name, self.of_tensors = types[key]

    def _of_tensors(type: Any) -> tuple[Any, Any, Any]:
        shape = type.shape if type.is_block() else ()
        type.of_tensors = core.tuple([core.constexpr(size) for size in shape]), core.constexpr(prod(shape)), type.scalar
        return type.of_tensors  # type: ignore[no-any-return]

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type = handle, type
        self.shape, self.numel, self.dtype = getattr(type, "of_tensors", None) or _of_tensors(type)

    def broadcast_impl_value(self: Any, one: Any, other: Any) -> Any:
        are_blocks = one.type.is_block() and other.type.is_block()
        if are_blocks and one.type.shape.values == other.type.shape.values:
            return one, other
        return broadcast(self, one, other)

    core.block_type.__init__, core.tensor.__init__ = block_type, tensor
    TritonSemantic.broadcast_impl_value = broadcast_impl_value


def _learn_bfloat16() -> None:
    import triton.language as tl
    from triton.runtime import interpreter

    builder, handle = type(interpreter.interpreter_builder), interpreter.TensorHandle
    dot, cast = builder.create_dot, builder.cast_impl

    def wide(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return handle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def constant(self: Any, value: float) -> Any:
        return handle((np.array([value], np.float32).view(np.uint32) >> 16).astype(np.uint16), tl.bfloat16)

    def create_dot(self: Any, a: Any, b: Any, *more: Any) -> Any:
        return dot(self, wide(a), wide(b), *more)

    def cast_impl(self: Any, x: Any, kind: Any) -> Any:
        makes = kind.scalar == tl.bfloat16 and x.dtype.scalar.is_int()
        return cast(self, cast(self, x, tl.float32) if makes else x, kind)

    builder.get_bf16, builder.create_dot, builder.cast_impl = constant, create_dot, cast_impl


def _learn_gluon() -> None:
    """Of it what our kernels say. Before these are imported."""
    import triton
    import triton.language as tl
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import ampere

    told: Any = (gluon, gl, ampere)
    told[0].jit = triton.jit
    told[1].arange = lambda start, end, layout: tl.arange(start, end)
    told[1].full = lambda shape, value, dtype, layout: tl.full(shape, value, dtype)
    told[1].convert_layout = lambda x, layout, assert_trivial=False: x
    told[2].mma_v2 = lambda a, b, sums: tl.dot(a, b, sums)
