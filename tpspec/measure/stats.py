"""The numbers of `savings`: pure functions of what was recorded, prompt by prompt.

Decoding is counted from the first token on: that token and its round belong to the prompt, and are in ttft alone. So
collectives per token are exactly those of a round over tokens per round. Must not know an engine, a clock or a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from tpspec.comm.communicator import Purpose
from tpspec.comm.messages import Drafting, Tally
from tpspec.topology.cost import tokens_by_position

if TYPE_CHECKING:
    from tpspec.measure.trace import Round
    from tpspec.topology.calibration import Calibration

RESAMPLES = 4000
COMPARED = ("tokens per second, plain", "tokens per second, speculative", "speed-up", "tokens per round")
# What Drafting counts; it says what each is.
ELSEWHERE = (
    *("hits", "misses", "late", "timeouts", "waited_rounds", "waited_s"),
    *("num_read", "num_dropped", "messages", "bytes", "work_s", "inside_s", "delayed_s"),
)
Drafts = tuple[tuple[int, ...], tuple[int, ...]]  # drafted and accepted of one round, by depth


@dataclass(frozen=True, slots=True)
class Record:
    """One prompt of num_prompt tokens, decoded one way.

    seconds, rounds, tallies, forward_s, drafting_s and elsewhere: after the first token.
    rounds: what each drafted and got accepted. tallies: collectives by purpose. forward_s: of the target's forward and
    its verdict, collectives included; drafting_s: of the draft source, as far as the lead waited for it. timed: the
    rounds again, with what each took. elsewhere: counts of ELSEWHERE; None where ranks draft for themselves.
    """

    category: str
    ids: tuple[int, ...]
    ttft: float
    seconds: float
    rounds: tuple[Drafts, ...]
    tallies: dict[str, Tally] = field(default_factory=dict)
    forward_s: float = 0.0
    drafting_s: float = 0.0
    num_prompt: int = 0
    timed: tuple[Round, ...] = ()
    elsewhere: dict[str, float] | None = None

    @property
    def num_tokens(self) -> int:
        return max(0, len(self.ids) - 1)


@dataclass(frozen=True, slots=True)
class Pair:
    """One prompt, both ways."""

    plain: Record
    speculative: Record

    @property
    def identical(self) -> bool:
        return self.plain.ids == self.speculative.ids


def tally_between(before: dict[str, Tally], after: dict[str, Tally]) -> dict[str, Tally]:
    """What was added, by purpose; of what occurred."""
    none = Tally()
    return {
        purpose: Tally(
            tally.count - before.get(purpose, none).count,
            tally.bytes - before.get(purpose, none).bytes,
            tally.seconds - before.get(purpose, none).seconds,
        )
        for purpose, tally in after.items()
        if tally.count > before.get(purpose, none).count
    }


def elsewhere_between(before: Drafting | None, after: Drafting | None) -> dict[str, float] | None:
    """What was added to the counts of ELSEWHERE; None where ranks draft for themselves."""
    if after is None:
        return None
    none = before or Drafting()
    return {name: getattr(after, name) - getattr(none, name) for name in ELSEWHERE}


def report(pairs: Sequence[Pair], calibration: Calibration) -> dict[str, Any]:
    """The object that `--json` prints: all prompts, and the same by category in the order of their first prompt."""
    categories = dict.fromkeys(pair.plain.category for pair in pairs)
    by_category = {
        name: _compared([pair for pair in pairs if pair.plain.category == name], calibration) for name in categories
    }
    return _compared(pairs, calibration) | {"by_category": by_category}


def _compared(pairs: Sequence[Pair], calibration: Calibration) -> dict[str, Any]:
    low, high = speedup_interval(pairs)
    speculative = [pair.speculative for pair in pairs]
    return {
        "plain": summary([pair.plain for pair in pairs]),
        "speculative": summary(speculative) | {"elsewhere": elsewhere(speculative)},
        "speedup": speedup(pairs),
        "speedup_low": low,
        "speedup_high": high,
        "identical": all(pair.identical for pair in pairs),
        "predicted": predicted(pairs, calibration),
    }


def source_beside_plain(plain: Sequence[Record], records: Sequence[Record]) -> dict[str, Any]:
    """One source's numbers over its prompts, and the same by category. ratio: of the speeds, by prompt."""
    categories = dict.fromkeys(record.category for record in plain)
    pairs = [Pair(*both) for both in zip(plain, records, strict=True)]
    by_category = {name: _source([pair for pair in pairs if pair.plain.category == name]) for name in categories}
    return _source(pairs) | {"by_category": by_category}


def _source(pairs: Sequence[Pair]) -> dict[str, Any]:
    records = [pair.speculative for pair in pairs]
    drafted = sum(sum(drafted) for drafted, _ in _rounds(records))
    low, high = speedup_interval(pairs)
    return summary(records) | {
        "drafts_per_round": _ratio(drafted, len(_rounds(records))),
        "ratio": _quartiles([ratio for pair in pairs if (ratio := speedup([pair])) is not None]),
        "speedup": speedup(pairs),
        "speedup_low": low,
        "speedup_high": high,
        "identical": all(pair.identical for pair in pairs),
        "elsewhere": elsewhere(records),
    }


def _quartiles(ratios: Sequence[float]) -> dict[str, float | None]:
    names = ("low", "median", "high")
    found = np.percentile(ratios, [25, 50, 75]).tolist() if ratios else (None,) * 3
    return dict(zip(names, found, strict=True))


def summary(records: Sequence[Record]) -> dict[str, Any]:
    """One way of decoding, over its prompts; seconds are sums over prompts, except ttft, their mean."""
    tokens, rounds = _sum(records, _tokens), sum(len(record.rounds) for record in records)
    seconds = _sum(records, _seconds)
    totals = _totals(records)
    return {
        "tokens": int(tokens),
        "rounds": rounds,
        "tokens_per_round": _ratio(tokens, rounds),
        "tokens_per_second": _ratio(tokens, seconds),
        "collectives_per_token": _per_token({name: tally.count for name, tally in totals.items()}, tokens),
        "bytes_per_token": _per_token({name: tally.bytes for name, tally in totals.items()}, tokens),
        "seconds_per_token": _per_token({name: tally.seconds for name, tally in totals.items()}, tokens),
        "wait_share": _ratio(sum(tally.seconds for tally in totals.values()), seconds),
        "ttft": fmean(record.ttft for record in records),
        "itl": _ratio(seconds, tokens),
        "acceptance": acceptance_by_position(_rounds(records)),
        "time_per_token": _time_per_token(records, tokens, seconds, totals),
    }


def elsewhere(records: Sequence[Record]) -> dict[str, float] | None:
    """The sums of what a drafter elsewhere did for these prompts; None without one."""
    counts = [record.elsewhere for record in records if record.elsewhere is not None]
    return {name: sum(count[name] for count in counts) for name in ELSEWHERE} if counts else None


def acceptance_by_position(rounds: Iterable[Drafts]) -> list[float]:
    """Of the rounds that drafted to a depth and got all above it accepted, the part that got this accepted too.

    Stops before the first depth that was never reached.
    """
    reached: list[int] = []
    passed: list[int] = []
    for drafted, accepted in rounds:
        depth = 0
        while depth < len(drafted):
            if depth == len(reached):
                reached.append(0)
                passed.append(0)
            reached[depth] += 1
            if not accepted[depth]:
                break
            passed[depth] += 1
            depth += 1
    return [good / all_ for good, all_ in zip(passed, reached, strict=True)]


def predicted_tokens_per_round(rounds: Sequence[Drafts]) -> float | None:
    """The cost model's tokens of a round, from acceptance by position, over the draft lengths that occurred."""
    acceptance = acceptance_by_position(rounds)
    lengths = [len(drafted) for drafted, _ in rounds]
    return fmean(tokens_by_position(acceptance[:length]) for length in lengths) if lengths else None


def predicted(pairs: Sequence[Pair], calibration: Calibration) -> dict[str, float | None]:
    """Both ways, from the box's constants, acceptance by position and the draft lengths and contexts that occurred.

    What the rounds of the pairs took is not looked at.
    """
    plain, speculative = [pair.plain for pair in pairs], [pair.speculative for pair in pairs]
    seconds, num_rounds = partial(predicted_s, calibration), len(_rounds(speculative))
    tokens = _predicted_tokens(speculative)
    before = _ratio(len(_rounds(plain)), _sum(plain, seconds))
    after = _ratio(tokens, _sum(speculative, seconds))
    return {
        "tokens_per_round": _ratio(tokens, num_rounds),
        "plain_tokens_per_second": before,
        "tokens_per_second": after,
        "speedup": after / before if after and before else None,
    }


def _predicted_tokens(records: Sequence[Record]) -> float:
    """Each category's with its own acceptance: whose drafts are always right would else stand for all at depth."""
    categories = {record.category for record in records}
    rounds = [_rounds([record for record in records if record.category == name]) for name in categories]
    return sum(len(some) * (predicted_tokens_per_round(some) or 0.0) for some in rounds)


def predictions(side: dict[str, Any]) -> list[tuple[str, float | None, float | None]]:
    """Of a report or one of its categories: what of COMPARED, as predicted, as measured."""
    guess, plain, speculative = side["predicted"], side["plain"], side["speculative"]
    guesses = (guess[key] for key in ("plain_tokens_per_second", "tokens_per_second", "speedup", "tokens_per_round"))
    found = (plain["tokens_per_second"], speculative["tokens_per_second"], side["speedup"])
    return list(zip(COMPARED, guesses, (*found, speculative["tokens_per_round"]), strict=True))


def predicted_s(calibration: Calibration, record: Record) -> float:
    """Of a prompt's rounds; each at the context that they have in the mean, for the time is linear in it."""
    drafts = [sum(drafted) for drafted, _ in record.rounds]
    step = calibration.step(context=record.num_prompt + record.num_tokens / 2)
    # What the first round verifies was drafted before the clock began.
    return sum(step.seconds(1 + num) for num in drafts) + calibration.draft_s * sum(drafts[1:])


def speedup(pairs: Sequence[Pair]) -> float | None:
    """Seconds per token, plain over speculative; None when nothing was decoded."""
    before = _ratio(_sum((pair.plain for pair in pairs), _seconds), _sum((pair.plain for pair in pairs), _tokens))
    speculative = [pair.speculative for pair in pairs]
    after = _ratio(_sum(speculative, _seconds), _sum(speculative, _tokens))
    return before / after if before and after else None


def speedup_interval(pairs: Sequence[Pair], seed: int = 0) -> tuple[float | None, float | None]:
    """95% of the speed-up, by bootstrap over prompts, each drawn with both its runs. None of fewer than two prompts.

    Efron and Tibshirani 1993, chapter 13 (percentile interval).
    """
    if len(pairs) < 2 or speedup(pairs) is None:
        return None, None
    columns = [
        (pair.plain.seconds, pair.plain.num_tokens, pair.speculative.seconds, pair.speculative.num_tokens)
        for pair in pairs
    ]
    drawn = np.random.default_rng(seed).integers(len(pairs), size=(RESAMPLES, len(pairs)))
    sums = np.array(columns, dtype=float)[drawn].sum(axis=1)
    plain_s, plain_tokens, speculative_s, speculative_tokens = sums[(sums > 0).all(axis=1)].T
    ratios = (plain_s / plain_tokens) / (speculative_s / speculative_tokens)
    low, high = np.percentile(ratios, [2.5, 97.5])
    return float(low), float(high)


def _rounds(records: Sequence[Record]) -> list[Drafts]:
    return [drafts for record in records for drafts in record.rounds]


def _totals(records: Sequence[Record]) -> dict[str, Tally]:
    purposes = dict.fromkeys(purpose for record in records for purpose in record.tallies)
    return {
        purpose: Tally(
            sum(record.tallies[purpose].count for record in records if purpose in record.tallies),
            sum(record.tallies[purpose].bytes for record in records if purpose in record.tallies),
            sum(record.tallies[purpose].seconds for record in records if purpose in record.tallies),
        )
        for purpose in purposes
    }


def _per_token(by_purpose: dict[str, float], tokens: float) -> dict[str, float | None]:
    everything = by_purpose | {"total": sum(by_purpose.values())}
    return {name: _ratio(value, tokens) for name, value in everything.items()}


def _time_per_token(
    records: Sequence[Record], tokens: float, seconds: float, totals: dict[str, Tally]
) -> dict[str, float | None]:
    """Where the seconds of a token go. rest: scheduling, news to the other ranks, this measurement.

    Collectives of a draft are part of drafting.
    """
    collectives = sum(tally.seconds for purpose, tally in totals.items() if purpose != Purpose.draft)
    forward = sum(record.forward_s for record in records)
    drafting = sum(record.drafting_s for record in records)
    parts = {
        "compute": max(0.0, forward - collectives),
        "collectives": collectives,
        "drafting": drafting,
        "rest": max(0.0, seconds - max(forward, collectives) - drafting),
    }
    return {name: _ratio(value, tokens) for name, value in parts.items()}


def _sum(records: Iterable[Record], value: Callable[[Record], float]) -> float:
    return sum(map(value, records))


def _tokens(record: Record) -> float:
    return record.num_tokens


def _seconds(record: Record) -> float:
    return record.seconds


def _ratio(above: float, below: float) -> float | None:
    return above / below if below else None
