"""How often ids occur in a text that grows by a few tokens a round: counted on from where it was counted last.

Penalties ask at every row, of texts that may have a hundred thousand tokens. Must not know what is made of it.

Shapes: R rows, V ids of one shard, C of them that occur.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tpspec.request import Sampling


class Counts(NamedTuple):
    """columns: ids of the shard that occur, from 0, ascending; how often each does in the output and on each path, and
    whether in the prompt, where that counts."""

    columns_C: NDArray[np.int64]
    prompt_C: NDArray[np.bool_]
    output_RC: NDArray[np.float32]


class Occurring:
    """Of a text, for one shard. text: only ever grows; the first num_prompt tokens are the prompt. with_prompt: whether
    that counts."""

    def __init__(self, text: Sequence[int], num_prompt: int, *, with_prompt: bool) -> None:
        self._text, self._num_prompt, self._with_prompt = text, num_prompt, with_prompt
        self._begin(range(0))

    @classmethod
    def wanted(cls, text: Sequence[int], num_prompt: int, sampling: Sampling) -> Occurring | None:
        """By a request; None where it penalizes nothing."""
        if not sampling.penalizes:
            return None
        return cls(text, num_prompt, with_prompt=sampling.repetition_penalty != 1)

    def counts(self, shard: range, paths: Sequence[Sequence[int]]) -> Counts:
        """shard: its ids, always the same, or all is counted anew. paths: tokens behind the text, of each row."""
        if shard != self._shard:
            self._begin(shard)
        self._go_on()
        behind = [(row, token - shard.start) for row, path in enumerate(paths) for token in path if token in shard]
        rows, columns = np.array(behind, np.int64).reshape(-1, 2).T
        occurs_V = self._prompt_V | (self._output_V > 0)
        occurs_V[columns] = True
        columns_C = np.flatnonzero(occurs_V)
        output_RC = np.tile(self._output_V[columns_C], (len(paths), 1))
        np.add.at(output_RC, (rows, columns_C.searchsorted(columns)), 1)
        return Counts(columns_C, self._prompt_V[columns_C], output_RC)

    def _begin(self, shard: range) -> None:
        self._shard, self._num_counted = shard, 0
        self._prompt_V, self._output_V = np.zeros(len(shard), bool), np.zeros(len(shard), np.float32)

    def _go_on(self) -> None:
        if self._num_counted < self._num_prompt:
            if self._with_prompt:
                self._prompt_V[self._columns(self._text[: self._num_prompt])] = True
            self._num_counted = self._num_prompt
        np.add.at(self._output_V, self._columns(self._text[self._num_counted :]), 1)
        self._num_counted = len(self._text)

    def _columns(self, tokens: Sequence[int]) -> NDArray[np.int64]:
        """Of those that are the shard's."""
        columns = np.array(tokens, np.int64) - self._shard.start
        return columns[(columns >= 0) & (columns < len(self._shard))]
