"""A kernel that takes a while. In Triton, imported on cards only."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer


@triton.jit(do_not_specialize=["nanoseconds"])  # type: ignore[untyped-decorator]
def linger(nanoseconds: int) -> None:
    """As the card's clock has it, whose ticks are up to a microsecond."""
    begun = globaltimer()
    while globaltimer() - begun < nanoseconds:
        tl.debug_barrier()
