"""Nouns of serving: how a request wants its tokens chosen, the request, and the pieces of the answer.

Plain msgspec structs: they travel between processes as they are. No text (the server's matter), no tensors.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

MAX_TEMPERATURE = 100.0
COLDEST = 1e-6  # what is colder is argmax, which logits of 32 bits divided by it would overflow to say
LEAST_PENALTY, MOST_PENALTY = 0.01, 100.0  # beyond them logits overflow, too
FinishReason = Literal["stop", "length", "abort", "error"]


class Sampling(msgspec.Struct, frozen=True):
    """How the next token is chosen from the target's logits; every field is applied before acceptance is judged.

    temperature 0 is argmax. top_k 0, top_p 1, min_p 0, repetition_penalty 1, presence_penalty 0, frequency_penalty 0
    and an empty logit_bias change nothing. Order: bias, penalties, temperature, top-k, top-p, min-p. The ids that are
    withheld are not drawn before the output has min_tokens.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    min_tokens: int = 0
    withheld: frozenset[int] = frozenset()
    seed: int = 0

    @property
    def truncates(self) -> bool:
        """Whether the support depends on the whole row (top-k, top-p, min-p), at a temperature above 0."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def penalizes(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def fault(self) -> str | None:
        """What is wrong with the first field that is out of range, beginning with its name; None when all are right."""
        checks = {
            "temperature": (
                self.temperature == 0 or COLDEST <= self.temperature <= MAX_TEMPERATURE,
                f"0, or from {COLDEST:g} to {MAX_TEMPERATURE:g}",
            ),
            "top_k": (self.top_k >= 0, "0 (off) or more"),
            "top_p": (0.0 < self.top_p <= 1.0, "above 0, at most 1"),
            "min_p": (0.0 <= self.min_p <= 1.0, "from 0 to 1"),
            "repetition_penalty": (
                LEAST_PENALTY <= self.repetition_penalty <= MOST_PENALTY,
                f"from {LEAST_PENALTY:g} to {MOST_PENALTY:g}",
            ),
            "presence_penalty": (math.isfinite(self.presence_penalty), "a finite number"),
            "frequency_penalty": (math.isfinite(self.frequency_penalty), "a finite number"),
            "min_tokens": (self.min_tokens >= 0, "0 or more"),
            "seed": (-(2**63) <= self.seed < 2**63, "a 64-bit integer"),
        }
        wrong = ((name, right) for name, (ok, right) in checks.items() if not ok)
        faults = (f"{name} is {getattr(self, name)}; it must be {right}" for name, right in wrong)
        return next(faults, None)


class Request(msgspec.Struct, frozen=True):
    """A prompt of token ids and what to do with it. id is unique in the life of a world.

    logprobs: how many of the likeliest ids are told beside each token; None tells nothing. prompt_logprobs: of the
    prompt too, from its second token on, in which case max_tokens may be 0. salt: texts that begin alike share what is
    cached of them only where this is equal. begun: the first tokens of the output, which another world has given, and
    num_scored: tokens of the prompt whose log-probabilities it has told. grammar: of the output, as tpspec/grammar.py
    writes it; empty binds nothing. Where it leaves nothing but the end the text ends, without a stop token, and be it
    shorter than min_tokens.
    """

    id: int
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = Sampling()
    stop_ids: frozenset[int] = frozenset()
    num_drafts: int | None = None  # draft length for this request; None leaves it to the topology
    logprobs: int | None = None
    prompt_logprobs: bool = False
    salt: str = ""
    begun: tuple[int, ...] = ()
    num_scored: int = 0
    grammar: str = ""


class Logprob(msgspec.Struct, frozen=True):
    """Of one token: its log-probability by the target's raw logits, and the likeliest ids with theirs, best first."""

    own: float
    top: tuple[tuple[int, float], ...] = ()


class Delta(msgspec.Struct, frozen=True):
    """What one round adds to one request. tokens may be empty when finish says why it ends.

    drafted and accepted count the draft tokens verified and accepted in this round, by depth (index 0: depth 1).
    logprobs: of each of `tokens`; prompt_logprobs: of the next tokens of the prompt. Empty unless asked for.
    num_cached: beside the first tokens, how many of the prompt's did not have to be read.
    """

    id: int
    tokens: tuple[int, ...]
    finish: FinishReason | None = None
    drafted: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    error: str | None = None
    logprobs: tuple[Logprob, ...] = ()
    prompt_logprobs: tuple[Logprob, ...] = ()
    num_cached: int = 0
