"""What `savings` saw, prompt by prompt, as JSON lines: which tokens the drafter guessed, and what each round took.

From it any draft length can be simulated: drafts from some position on are accepted up to the first wrong guess.
Must not know an engine, tensors or how a round is simulated.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec

from tpspec.comm.communicator import Purpose
from tpspec.comm.messages import Stats, Tally
from tpspec.errors import UserError
from tpspec.topology.calibration import Sample
from tpspec.written import whole

if TYPE_CHECKING:
    from pathlib import Path

    from tpspec.request import Delta

# Would the drafter have guessed the token, given the true text before it? silent: it proposed nothing there.
YES, NO, SILENT, UNKNOWN = "y", "n", "-", "?"
Count = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]


class Round(msgspec.Struct, frozen=True):
    """One round. drafted: how deep the trees were; rows: all of them and the roots.

    seconds: since the round before, with forward_s (collectives included) and drafting_s in them: of the drafts of the
    next round, or of its own, where drafts are gathered as a round begins (engine/hosts.py). reduces: all-reduces,
    which sent reduce_bytes in all and took reduce_s.
    """

    rows: Count
    drafted: Count
    accepted: Count
    tokens: Count
    seconds: Seconds
    forward_s: Seconds
    drafting_s: Seconds
    reduces: Count = 0
    reduce_bytes: Count = 0
    reduce_s: Seconds = 0.0


class Recording(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One prompt. guesses: a letter for each token of the answer. max_tokens: that the answer could have had.

    draft_tokens: how many were asked for in each of the speculative rounds; where the engine chose, the most it asks
    for, so that what it left out counts as silence. Rounds are those after the first token, of this prompt alone.
    """

    category: str
    prompt_tokens: Annotated[int, msgspec.Meta(ge=1)]
    guesses: Annotated[str, msgspec.Meta(pattern="^[yn?-]+$")]
    max_tokens: Annotated[int, msgspec.Meta(ge=1)]
    draft_tokens: Count = 0
    plain: tuple[Round, ...] = ()
    speculative: tuple[Round, ...] = ()

    @property
    def output_tokens(self) -> int:
        return len(self.guesses)

    def fault(self) -> str | None:
        if self.output_tokens > self.max_tokens:
            return f"{self.output_tokens} guesses for an answer of at most {self.max_tokens} tokens"
        for name, rounds in (("plain", self.plain), ("speculative", self.speculative)):
            if rounds and sum(one.tokens for one in rounds) != self.output_tokens - 1:
                return f"the tokens of the {name} rounds should be as many as the guesses, without the first"
        return None


class Mark(NamedTuple):
    """The end of a round: when, and what had been counted."""

    at: float
    stats: Stats


def round_between(before: Mark, end: Mark, deltas: Sequence[Delta]) -> Round:
    """deltas: of the round that ended at `end`; it read no prompt."""
    sent, sent_before = _reduced(end.stats), _reduced(before.stats)
    return Round(
        rows=sum(1 + sum(delta.drafted) for delta in deltas),
        drafted=sum(len(delta.drafted) for delta in deltas),
        accepted=sum(sum(delta.accepted) for delta in deltas),
        tokens=sum(len(delta.tokens) for delta in deltas),
        seconds=end.at - before.at,
        forward_s=end.stats.forward_s - before.stats.forward_s,
        drafting_s=end.stats.drafting_s - before.stats.drafting_s,
        reduces=sent.count - sent_before.count,
        reduce_bytes=sent.bytes - sent_before.bytes,
        reduce_s=sent.seconds - sent_before.seconds,
    )


def samples_of(rounds: Sequence[Round], context: int) -> Iterator[Sample]:
    """For the cost model. context: tokens before the first of them.

    A round drafts what the next verifies, so the last of an answer is no sample.
    """
    for one, after in pairwise(rounds):
        yield Sample(
            rows=one.rows,
            step_s=one.forward_s,
            reduce_s=one.reduce_s,
            reduces=one.reduces,
            draft_s=one.drafting_s,
            num_drafted=after.rows - 1,
            host_s=max(0.0, one.seconds - one.forward_s - one.drafting_s),
            context=context,
        )
        context += one.tokens


def _reduced(stats: Stats) -> Tally:
    """All-reduces only, as in the cost model: the gather of picks is part of a forward's constant time."""
    tallies = [stats.collectives.get(purpose, Tally()) for purpose in (Purpose.attention, Purpose.mlp, Purpose.norm)]
    return Tally(
        sum(tally.count for tally in tallies),
        sum(tally.bytes for tally in tallies),
        sum(tally.seconds for tally in tallies),
    )


def guesses_of(rounds: Iterable[Round], num_tokens: int, max_tokens: int, asked: int) -> str:
    """What rounds tell about an answer of num_tokens. asked: the draft length.

    Who drafted less than he was asked for, all of it right, had nothing to say about the next token.
    """
    known = [UNKNOWN] * num_tokens
    at = 1  # the first token is the prompt's
    for one in rounds:
        known[at : at + one.accepted] = YES * one.accepted
        after = at + one.accepted
        if after < num_tokens and one.accepted < one.drafted:
            known[after] = NO
        elif after < num_tokens and one.drafted < wanted(asked, at, max_tokens):
            known[after] = SILENT
        at += one.tokens
    return "".join(known[:num_tokens])


def wanted(asked: int, at: int, max_tokens: int) -> int:
    """How many drafts a round from output position `at` asks for: it gives one token more by itself."""
    return min(asked, max_tokens - at - 1)


def drafts(recording: Recording) -> dict[int, int]:
    """How much each speculative round drafted, by the output position where it began."""
    begins = accumulate((one.tokens for one in recording.speculative), initial=1)
    return {at: one.drafted for at, one in zip(begins, recording.speculative, strict=False)}


def offers(recording: Recording) -> dict[int, int]:
    """Of these, those that were less than was asked for: the drafter would not have said more."""
    asked, most = recording.draft_tokens, recording.max_tokens
    return {at: drafted for at, drafted in drafts(recording).items() if drafted < wanted(asked, at, most)}


def settled(recordings: Sequence[Recording], seed: int) -> list[str]:
    """Their guesses without unknown ones: those are drawn from the known ones of the same category."""
    known: dict[str, str] = {}
    for one in recordings:
        known[one.category] = known.get(one.category, "") + one.guesses.replace(UNKNOWN, "")
    everything = "".join(known.values()) or SILENT
    draw = random.Random(seed).choice
    return [
        "".join(draw(known[one.category] or everything) if guess == UNKNOWN else guess for guess in one.guesses)
        for one in recordings
    ]


def unsilenced(recordings: Iterable[Recording]) -> list[Recording]:
    """Of a drafter that has something to say everywhere, and stopped where more did not pay: nobody knows what."""
    replace = msgspec.structs.replace
    return [replace(one, guesses=one.guesses.replace(SILENT, UNKNOWN), draft_tokens=0) for one in recordings]


def made_up(
    acceptance: float, seed: int, *, count: int = 16, prompt_tokens: int = 64, num_tokens: int = 256
) -> list[Recording]:
    """Recordings of nobody: each token is guessed with the same probability, whatever came before."""
    draw = random.Random(seed).random
    letters = ("".join(YES if draw() < acceptance else NO for _ in range(num_tokens)) for _ in range(count))
    return [Recording("made up", prompt_tokens, guesses, num_tokens) for guesses in letters]


def write(path: Path, recordings: Iterable[Recording]) -> None:
    with whole(path, "--trace") as part:
        part.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in recordings))


def read(path: Path) -> list[Recording]:
    """Raises UserError with the number of a line that is wrong."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"--trace {path}: cannot be read: {error.strerror}") from error
    found = [_read_line(line, f"{path}:{number}") for number, line in enumerate(lines, start=1) if line.strip()]
    if not found:
        raise UserError(f"--trace {path}: is empty; savings --trace FILE writes one")
    return found


def _read_line(line: bytes, where: str) -> Recording:
    try:
        recording = msgspec.json.decode(line, type=Recording)
    except msgspec.MsgspecError as error:
        raise UserError(f"{where}: no line of a trace: {error}") from error
    if fault := recording.fault():
        raise UserError(f"{where}: {fault}")
    return recording
