"""Rows of the table of embeddings, which stays in host memory: no collective, no card memory.

Knows token ids; must not know rows of a round, nor what runs on them.

Shapes: T tokens, D hidden, V ids.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from tpspec.published.formats import HEAD, UNUSED
from tpspec.staged import WORDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from tpspec.model.weights import Checkpoint

log = logging.getLogger(__name__)
TABLE = "model.embed_tokens"


def head_of(checkpoint: Checkpoint, shape: tuple[int, int], *, tied: bool) -> str:
    """The module whose weight, [V, D], makes logits. tied: by its config the table of embeddings.

    A head of other numbers that is there all the same is meant, as by transformers.
    """
    table, head = f"{TABLE}.weight", f"{HEAD}.weight"
    if not tied:
        return HEAD
    if in_codes := sorted(checkpoint.under(HEAD) - {"weight", "bias"} - UNUSED):
        log.warning(
            "%s: config.json says tie_word_embeddings: %s of %s is not read, %s makes logits; should be "
            "tie_word_embeddings: false, if the head is another", checkpoint.folder, ", ".join(in_codes), HEAD, TABLE,
        )  # fmt: skip
        return TABLE
    if head not in checkpoint or torch.equal(checkpoint.mapped(head, shape), checkpoint.mapped(table, shape)):
        return TABLE
    log.warning(
        "%s: config.json says tie_word_embeddings, and %s has other numbers than %s: it is taken; "
        "should be tie_word_embeddings: false", checkpoint.folder, head, table,
    )  # fmt: skip
    return HEAD


class Embedding:
    """table_VD: floats on the host, of two bytes or more. dtype: of the model, which rows have.

    scale: what rows are multiplied by, as that dtype holds it. eps: of the RMSNorm without a weight that they are to
    have; or None.
    """

    def __init__(
        self, table_VD: Tensor, dtype: torch.dtype, scale: float | None = None, eps: float | None = None
    ) -> None:
        self._dtype, self._table_dtype, self._scale, self._eps = dtype, table_VD.dtype, scale, eps
        self.width = table_VD.shape[1]
        # Taken by numpy: torch needs several times as long for a few rows, and every round comes by here.
        self._words_VD = table_VD.view(WORDS[table_VD.itemsize]).numpy()
        flags = self._words_VD.flags
        # Rows are the table's own, and numpy takes them without copying all of it first.
        is_plain = scale is None and eps is None and dtype == self._table_dtype
        self._is_takeable = is_plain and flags.aligned and flags.c_contiguous

    def rows(self, tokens: Sequence[int]) -> Tensor:
        """[T, D], on the host. IndexError for a token that has none."""
        self._check(tokens)
        rows_TD = torch.from_numpy(self._words_VD[list(tokens)]).view(self._table_dtype).to(self._dtype)
        if self._eps is not None:
            rows_TD = F.rms_norm(rows_TD.float(), (self.width,), eps=self._eps).to(self._dtype)
        return rows_TD if self._scale is None else rows_TD * self._scale

    def put(self, tokens: Sequence[int], room: NDArray[Any]) -> None:
        """The same, one row behind the other, into the first of a room's words."""
        if not (tokens and self._is_takeable):
            _put(self.rows(tokens), room)
            return
        self._check(tokens)
        if len(tokens) == 1:
            room[: self.width] = self._words_VD[tokens[0]]  # in half the time that numpy needs to take one
        else:
            room_TD = room[: len(tokens) * self.width].reshape(-1, self.width)
            self._words_VD.take(tokens, 0, room_TD, "clip")  # where numpy could still raise, it copies twice

    def _check(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if not 0 <= token < len(self._words_VD):
                raise IndexError(f"token {token} has no embedding")


class Joined:
    """Tables whose rows for a token are one row: [T, sum of their widths]. As an `Embedding`."""

    def __init__(self, tables: Sequence[Embedding]) -> None:
        self._tables, self.width = tables, sum(table.width for table in tables)

    def rows(self, tokens: Sequence[int]) -> Tensor:
        return torch.cat([table.rows(tokens) for table in self._tables], 1)

    def put(self, tokens: Sequence[int], room: NDArray[Any]) -> None:
        _put(self.rows(tokens), room)


def _put(rows_TX: Tensor, room: NDArray[Any]) -> None:
    room[: rows_TX.numel()] = rows_TX.view(WORDS[rows_TX.itemsize]).numpy().ravel()


Tables = Embedding | Joined
