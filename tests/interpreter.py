"""Triton's interpreter, made quicker where no card is: what it computes is as it was.

At every call of a function by a kernel it looks through all of Triton's language for what it has to replace, where all
has been replaced when the kernel was launched. Of every sum and product it asks whether it overflows, and does not look
at the answer, which only its debugging does. And it makes the same table of types again for every tensor. Half of the
time of tests of kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any


def hurry() -> None:
    """From now on."""
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


def _look_once() -> None:
    """Once a launch, for each of the modules that functions know the language by."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    replaced = set[frozenset[str]]()

    @cache
    def known_by(function: Callable[..., Any]) -> frozenset[str]:
        known = function.__globals__.values()
        return frozenset(module.__name__ for module in (tl, tl.core) if any(one is module for one in known))

    def replace_once(function: Callable[..., Any]) -> Any:
        if known_by(function) in replaced:
            return None  # of a call by a kernel, which does not restore
        replaced.add(known_by(function))
        return patch(function)

    def launch_anew(*args: Any, **kwargs: Any) -> Any:
        replaced.clear()
        return launch(*args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = replace_once, launch_anew
