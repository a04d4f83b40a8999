"""Triton's interpreter, made quicker where no card is: what it computes is as it was.

At every call of a function by a kernel it looks through all of Triton's language for what it has to replace, where all
has been replaced when the kernel was launched, and what that is was known from the first time. Of every sum and product
it asks whether it overflows, and does not look at the answer, which only its debugging does. And it makes the same
table of types, and the same type and shape, again for every tensor, asks again what becomes of two types in one
operation, and makes a tensor of the same number. Most of the time of tests of kernels.

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
    _know_operands()
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
    from triton.language import semantic as semantic_module
    from triton.language.semantic import TritonSemantic

    core: Any = tl.core
    semantic: Any = semantic_module
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

    unwrap, are_equal = core._unwrap_if_constexpr, core.dtype.__eq__
    as_they_are = {core.tensor, core.dtype, core.block_type, core.pointer_type, int, float, bool, str, type(None)}

    def unwrap_if_constexpr(x: Any) -> Any:
        return x if type(x) in as_they_are else unwrap(x)

    def eq(self: Any, other: Any) -> bool:
        return self.name == other.name if type(other) is core.dtype else are_equal(self, other)

    for module in (core, semantic):
        module._unwrap_if_constexpr = unwrap_if_constexpr
    core.dtype.__eq__ = eq
    core.block_type.__init__, core.tensor.__init__ = block_type, tensor
    TritonSemantic.broadcast_impl_value = broadcast_impl_value


MOST_NUMBERS = 1 << 9  # that are kept as tensors, of the shape they were needed in


def _know_operands() -> None:
    """What two tensors become in an operation depends on their types alone, and what a number becomes, on it and on the
    other's type. What is refused is asked of Triton every time."""
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    handle = interpreter.TensorHandle
    check, broadcast = TritonSemantic.binary_op_type_checking_impl, TritonSemantic.broadcast_impl_value
    pairs, shapes, numbers = dict[Any, Any](), dict[Any, Any](), dict[Any, Any]()

    def spread(self: Any, x: Any, type: Any) -> Any:
        """x in the shape of that type, of the same elements."""
        of, element = x.handle.data, x.handle.dtype.scalar
        if x.type.is_block():
            data = np.broadcast_to(of, type.shape)
        else:  # of one number, which may have been computed in another type
            data = np.full(type.shape, of, interpreter._get_np_dtype(element))
        return self.tensor(handle(data, element), type)

    def become(self: Any, x: Any, element: Any, type: Any) -> Any:
        x = x if element is None else self.cast(x, element)
        return x if type is None else spread(self, x, type)

    def steps(x: Any, made: Any) -> tuple[Any, Any]:
        """What `become` takes to make the one of the other."""
        is_other = x.type.scalar.name != made.type.scalar.name
        is_spread = made.type.is_block() and [*made.type.shape] != ([*x.type.shape] if x.type.is_block() else None)
        return made.type.scalar if is_other else None, made.type if is_spread else None

    def binary_op_type_checking_impl(self: Any, lhs: Any, rhs: Any, *given: Any, **named: Any) -> tuple[Any, Any]:
        is_number = type(lhs) in (int, float, bool), type(rhs) in (int, float, bool)
        ways = given, tuple(named.items())
        if is_number == (False, False):
            if (key := (lhs.type.name, rhs.type.name, ways)) not in pairs:
                made = check(self, lhs, rhs, *given, **named)
                pairs[key] = (*steps(lhs, made[0]), *steps(rhs, made[1]))
                return made
            left, left_type, right, right_type = pairs[key]
            return become(self, lhs, left, left_type), become(self, rhs, right, right_type)
        if is_number == (True, True):
            return check(self, lhs, rhs, *given, **named)
        number, x = (lhs, rhs) if is_number[0] else (rhs, lhs)
        key = number, type(number), x.type.name, is_number, ways
        if (known := numbers.get(key)) is None:
            made = check(self, lhs, rhs, *given, **named)
            of_number, of_x = made if is_number[0] else made[::-1]
            if len(numbers) >= MOST_NUMBERS:
                numbers.clear()
            of_number.handle.data.flags.writeable = False
            numbers[key] = of_number, *steps(x, of_x)
            return made
        of_number, element, x_type = known
        x = become(self, x, element, x_type)
        return (of_number, x) if is_number[0] else (x, of_number)

    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        if (key := (lhs.type.name, rhs.type.name)) not in shapes:
            made = broadcast(self, lhs, rhs)
            shapes[key] = steps(lhs, made[0])[1], steps(rhs, made[1])[1]
            return made
        left, right = shapes[key]
        return become(self, lhs, None, left), become(self, rhs, None, right)

    TritonSemantic.binary_op_type_checking_impl = binary_op_type_checking_impl
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
