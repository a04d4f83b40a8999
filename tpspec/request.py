"""Nouns of serving: how a request wants its tokens chosen, the request, and the pieces of the answer.

Plain msgspec structs: they travel between processes as they are. No text (the server's matter), no tensors.
"""

from __future__ import annotations

from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "abort", "error"]


class Sampling(msgspec.Struct, frozen=True):
    """How the next token is chosen from the target's logits; every field is applied before acceptance is judged.

    temperature 0 is argmax. top_k 0, top_p 1, min_p 0, repetition_penalty 1, presence_penalty 0, frequency_penalty 0
    and an empty logit_bias change nothing. Order: bias, penalties, temperature, top-k, top-p, min-p.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int = 0

    @property
    def truncates(self) -> bool:
        """Whether the support depends on the whole row (top-k, top-p, min-p), at a temperature above 0."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def penalizes(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


class Request(msgspec.Struct, frozen=True):
    """A prompt of token ids and what to do with it. id is unique in the life of a world."""

    id: int
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = Sampling()
    stop_ids: frozenset[int] = frozenset()
    num_drafts: int | None = None  # draft length for this request; None leaves it to the topology


class Delta(msgspec.Struct, frozen=True):
    """What one round adds to one request. tokens may be empty when finish says why it ends.

    drafted and accepted count the draft tokens verified and accepted in this round, by depth (index 0: depth 1).
    """

    id: int
    tokens: tuple[int, ...]
    finish: FinishReason | None = None
    drafted: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    error: str | None = None
