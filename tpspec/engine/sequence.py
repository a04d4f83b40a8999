"""One request on its way: its tokens so far and how many of them are cached; everything else is derived.

Knows no pages, no other sequence and no policy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpspec.verify.occurring import Occurring

if TYPE_CHECKING:
    from tpspec.request import FinishReason, Request
    from tpspec.verify.allowed import Constraint


class Sequence:
    """tokens: prompt and output, one list that only ever grows, the root last; max_total: that it can ever have.

    Whoever keeps `tokens` beyond the round copies it. num_cached: the first tokens whose keys and values are cached.
    num_scored: positions of the prompt whose rows have told the log-probability of the token that follows. keys, of the
    pages that its text fills, as far as they have been made; num_kept: those under which its own are kept. num_found:
    tokens of the prompt that were cached when it came; None until it is admitted. occurring: of tokens, for penalties.
    is_doubtful: its last round ended at a corrupt row, which may be the fault of a draft beside it.
    """

    __slots__ = (
        "constraint",
        "id",
        "is_doubtful",
        "keys",
        "max_total",
        "num_cached",
        "num_found",
        "num_kept",
        "num_prompt",
        "num_scored",
        "occurring",
        "request",
        "sampling",
        "tokens",
    )

    def __init__(self, request: Request, constraint: Constraint | None = None) -> None:
        self.request, self.constraint = request, constraint
        self.id, self.sampling, self.num_prompt = request.id, request.sampling, len(request.prompt)
        self.max_total = self.num_prompt + request.max_tokens
        self.tokens = [*request.prompt, *request.begun]
        self.occurring = Occurring.wanted(self.tokens, self.num_prompt, self.sampling)
        self.num_scored = request.num_scored
        self.num_cached = self.num_kept = 0
        self.num_found: int | None = None
        self.keys: list[bytes] = []
        self.is_doubtful = False

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def root(self) -> int:
        return self.tokens[-1]

    @property
    def remaining(self) -> int:
        """Tokens it may still emit."""
        return self.max_total - len(self.tokens)

    @property
    def num_uncached(self) -> int:
        return len(self.tokens) - self.num_cached

    @property
    def num_passable(self) -> int:
        """Tokens that nobody has to read if they are cached; the last gives logits, and so do those that are scored."""
        return self.num_scored if self.request.prompt_logprobs else self.num_tokens - 1

    @property
    def is_ready(self) -> bool:
        """Only the root is not cached: its next span can carry a tree."""
        return len(self.tokens) - self.num_cached == 1

    def unscored(self, stop: int) -> range:
        """Positions before `stop` that are to be read and owe the log-probability of the prompt's next token."""
        last = self.num_prompt - 1 if self.request.prompt_logprobs else 0
        return range(max(self.num_cached, self.num_scored), min(stop, last))

    def truncated(self, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], FinishReason | None]:
        """What of `tokens` may be emitted, and how they end the text; "error": its grammar had no token for it."""
        allowed, finish = self._within_limits(tokens)
        if self.constraint is None:
            return allowed, finish
        kept = self.constraint.keep(self.output, allowed)
        return kept.tokens, kept.finish or finish

    def _within_limits(self, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], FinishReason | None]:
        """Up to the first stop token, which is kept, or up to max_tokens."""
        remaining = self.remaining
        allowed = tokens[:remaining]
        if not self.request.stop_ids.isdisjoint(allowed):
            end = next(i for i, token in enumerate(allowed, 1) if token in self.request.stop_ids)
            return allowed[:end], "stop"
        return allowed, "length" if len(allowed) == remaining else None
