"""How much of a text is as it was last time: texts grow by what is committed, and only a drafted tail is taken back."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

WINDOW = 64


def common_length(old: Sequence[int], new: Sequence[int]) -> int:
    """The largest n for which the WINDOW tokens before n agree; the common prefix, found from its end.

    Costs as much as was taken back, not as much as there is: committed tokens never change, so agreement over a window
    that is longer than any draft is agreement from the start. (Where it is not, a draft is worse, never wrong.)
    """
    n = min(len(old), len(new))
    while n > 0 and not _are_alike(old[max(0, n - WINDOW) : n], new[max(0, n - WINDOW) : n]):
        n -= 1
    return n


def _are_alike(some: Sequence[int], others: Sequence[int]) -> bool:
    return some == others or list(some) == list(others)
