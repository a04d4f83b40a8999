"""Texts and their taps as batches for a head: which rows predict, from what, and what the target said there.

Row i of a text stands for a round whose last committed token is i + 1: the features of position i are known, tokens up
to i + 1 are read, and draft step k is to predict token i + 2 + k, whose law the target gave at position i + 1 + k.

Shapes: B texts, S positions, A rows that predict, D hidden, V draft ids.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from tpspec.errors import UserError
from tpspec.train.taps import PER_SHARD, groups, padded

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from tpspec.train.taps import Shards, Tapped
    from tpspec.train.texts import Told

LEAST = 2  # tokens of an answer that teach nothing


@dataclass(frozen=True, slots=True)
class Batch:
    """rows_BA: positions of the rows that predict (the last real one repeats as padding). sizes_B: of the texts."""

    ids_BS: Tensor
    features_BSX: Tensor
    final_BSD: Tensor
    rows_BA: Tensor
    sizes_B: Tensor
    kinds: tuple[str, ...]

    @classmethod
    def of(cls, texts: Sequence[Tapped], *, answers: bool) -> Batch:
        """answers: only the rows of the answers predict, and not those of the prompts, too."""
        sizes = [len(tapped.told.ids) for tapped in texts]
        firsts = [len(tapped.told.prompt) - 1 if answers else 0 for tapped in texts]
        rows = [torch.arange(first, max(first + 1, size - 2)) for first, size in zip(firsts, sizes, strict=True)]
        most = max(map(len, rows))
        return cls(
            ids_BS=padded([torch.tensor(tapped.told.ids) for tapped in texts]),
            features_BSX=padded([tapped.features_SX for tapped in texts]),
            final_BSD=padded([tapped.final_SD for tapped in texts]),
            rows_BA=torch.stack([row[torch.arange(most).clamp(max=len(row) - 1)] for row in rows]),
            sizes_B=torch.tensor(sizes),
            kinds=tuple(tapped.told.kind for tapped in texts),
        )

    def to(self, device: torch.device) -> Batch:
        names = ("ids_BS", "features_BSX", "final_BSD", "rows_BA", "sizes_B")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    @property
    def num_tokens(self) -> int:
        return int(self.sizes_B.sum())

    def real_BA(self) -> Tensor:
        """Rows that are not padding."""
        first_A = torch.ones_like(self.rows_BA[:, :1], dtype=torch.bool)
        return torch.cat([first_A, self.rows_BA.diff(dim=1) > 0], 1)

    def predicts(self, step: int) -> Tensor:
        """[B, A] bool: rows whose token of draft step `step` is in the text."""
        return self.real_BA() & (self.rows_BA + step + 2 < self.sizes_B[:, None])

    def tokens(self, ahead: int) -> Tensor:
        """[B, A]: the token `ahead` places after each row; the text's last one beyond its end."""
        return self.ids_BS.gather(1, (self.rows_BA + ahead).clamp(max=self.ids_BS.shape[1] - 1))

    def judged_BAD(self) -> Tensor:
        """[B, A, D]: the target's last hidden states one place after each row; k columns on, those for draft step k."""
        places_BA = (self.rows_BA + 1).clamp(max=self.ids_BS.shape[1] - 1)
        return self.final_BSD.gather(1, places_BA[..., None].expand(-1, -1, self.final_BSD.shape[-1]))


def split(shards: Shards, held_out: float) -> tuple[list[int], list[int]]:
    """Shards to train on and shards to measure with: the last that have a greedy answer, one at least.

    Raises UserError where there is nothing to learn from, or to measure with.
    """
    if len(shards) < 2:
        num_texts = sum(len(shards.texts(index)) for index in range(len(shards)))
        raise UserError(f"{num_texts} texts; should hold more than {PER_SHARD}, some of them to measure with")
    greedy = [index for index in range(len(shards)) if any(_is_met(told) for told in shards.texts(index))]
    if not greedy:
        raise UserError("no text with a greedy answer, to measure with; should hold some of temperature 0")
    held = greedy[-min(max(1, round(len(shards) * held_out)), len(shards) - 1) :]
    learnt = [index for index in range(len(shards)) if index not in held]
    if not any(len(told.answer) > LEAST for index in learnt for told in shards.texts(index)):
        raise UserError(
            f"no text with an answer of more than {LEAST} tokens, but those to measure with; should hold some"
        )
    return learnt, held


def _is_met(told: Told) -> bool:
    """Whether a drafter would have met this text, and had something to say."""
    return len(told.answer) > LEAST and not told.temperature


def shard_batches(shards: Shards, index: int, most: int, *, greedy: bool = False) -> Iterator[Batch]:
    """One shard's texts, likes together, with at most `most` positions a batch; texts without a row to learn are out.

    greedy: only texts that were written so, and of them the answers: what a drafter would have met.
    """
    texts = [tapped for tapped in shards.read(index) if len(tapped.told.answer) > LEAST]
    texts = [tapped for tapped in texts if not greedy or _is_met(tapped.told)]
    for group in groups([len(tapped.told.ids) for tapped in texts], most):
        yield Batch.of([texts[i] for i in group], answers=greedy)


def endless(shards: Shards, indices: Sequence[int], most: int, seed: int) -> Iterator[Batch]:
    """Batches epoch after epoch, shards and then the batches of each in an order of chance."""
    epoch = 0
    while True:
        chance = random.Random(f"{seed} {epoch}")
        for index in chance.sample(indices, len(indices)):
            batches = [*shard_batches(shards, index, most)]
            chance.shuffle(batches)
            yield from batches
        epoch += 1
