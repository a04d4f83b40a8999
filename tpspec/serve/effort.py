"""What the tokens of one HTTP request cost: rounds, collectives, and draft tokens that were verified and kept.

Counts, and the two forms in which clients read them: ours, and vLLM's `metrics.speculative_decoding`. Must not know
requests, text or how it is sent.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]


@dataclass(slots=True)
class Effort:
    """Of all sequences of a call. Only tokens that were sent count, so `accepted` never exceeds `tokens`.

    thought: of the tokens, those that are no part of what is said. rounds: of each sequence. collectives: those of the
    rounds that gave the call tokens, whole, whoever else was served in them. cached: tokens of the prompts that did not
    have to be read. steps: how many rounds verified a draft, by the number of tokens they drafted and accepted.
    """

    sequences: int = 0
    tokens: int = 0
    thought: int = 0
    rounds: int = 0
    collectives: int = 0
    cached: int = 0
    drafted: int = 0
    accepted: int = 0
    steps: Counter[tuple[int, int]] = field(default_factory=Counter)

    def add(self, num_tokens: int, num_drafted: int, num_accepted: int) -> None:
        """One round of one sequence."""
        self.tokens += num_tokens
        self.rounds += 1
        self.drafted += num_drafted
        self.accepted += num_accepted
        if num_drafted:
            self.steps[num_drafted, num_accepted] += 1

    def speculation(self) -> Json:
        return {
            "rounds": self.rounds,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "tokens_per_round": round(self.tokens / self.rounds, 3) if self.rounds else None,
            "collectives_per_token": round(self.collectives / self.tokens, 3) if self.tokens else None,
        }

    def metrics(self) -> Json | None:
        """vLLM's, of one sequence; None where several share the counts, or nothing was drafted.

        Source: vllm-project/vllm, docs/features/speculative_decoding/acceptance_metrics.md. Its `num_spec_tokens` is a
        setting, the longest draft; drafts here have no fixed length, so it is the longest this request had.
        """
        if self.sequences != 1 or not self.steps:
            return None
        num_steps = self.steps.total()
        by_length = {
            str(length): self._accepted_of(length) for length in sorted({drafted for drafted, _ in self.steps})
        }
        speculative_decoding = {
            "mean_acceptance_length": 1 + self.accepted / num_steps,
            "draft_acceptance_rate": self.accepted / self.drafted,
            "acceptance_histogram": self._accepted_of(None),
            "acceptance_histogram_by_draft_length": by_length,
            "num_spec_steps": num_steps,
            "num_accepted_draft_tokens": self.accepted,
            "num_draft_tokens": self.drafted,
            "num_spec_tokens": max(drafted for drafted, _ in self.steps),
        }
        return {"speculative_decoding": speculative_decoding}

    def _accepted_of(self, length: int | None) -> list[int]:
        """At [j], rounds that accepted j tokens of a draft of this length, or of any."""
        longest = length if length is not None else max(drafted for drafted, _ in self.steps)
        counts = [0] * (longest + 1)
        for (drafted, accepted), num_rounds in self.steps.items():
            if length in (None, drafted):
                counts[accepted] += num_rounds
        return counts
