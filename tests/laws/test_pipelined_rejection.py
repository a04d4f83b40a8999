"""The law of `rejection` when drafts are made elsewhere and ahead, over several rounds, with messages lost on the way.

Tables stand for both models; engine, host, messages and drafter are the real ones. Texts of a fixed set of seeds are
counted and compared with the closed form by chi-squared: a right program stays above the threshold once and for ever.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import cache

import msgspec
import numpy as np
import pytest
import torch

from tests.draft.table import Table
from tests.engine.wire import DrafterEnd, Faults, Wire
from tests.worlds import Script, Told
from tpspec.cache.pages import PagePool
from tpspec.comm.channel import OneRankChannel
from tpspec.comm.ledger import Ledger
from tpspec.comm.messages import Drafts, Reach, Submit
from tpspec.draft.ahead import Ahead, Policy
from tpspec.draft.model import ModelDrafter
from tpspec.engine.engine import Engine
from tpspec.engine.pace import Pace
from tpspec.engine.remote import RemoteHost, Way
from tpspec.engine.scheduler import Scheduler
from tpspec.model.batch import Moves, Span, StateCopy
from tpspec.request import Request, Sampling
from tpspec.roles.drafter import Drafter
from tpspec.roles.target import lead_rounds
from tpspec.tokens import TokenTree
from tpspec.verify.noise import CounterNoise, Stream
from tpspec.verify.rejection import Rejection
from tpspec.verify.rows import RowLogits

VOCAB = 5
PROMPT = (2, 0)
LENGTH, JUDGED = 8, slice(2, 6)  # tokens that are made; of those whose law is tested some were drafted ahead
NUM_RUNNING = 16
FAN_OUT = Way(Reach(ahead=True, width=3))
FAULTS = Faults(lost=0.05, twice=0.1, late=0.2, stops=0.1)
LEAST_P = 1e-4
CAUGHT_P = 1e-5


@cache
def target(prefix: tuple[int, ...]) -> torch.Tensor:
    return _logits(prefix, 1)


@cache
def other(prefix: tuple[int, ...]) -> torch.Tensor:
    """A model that agrees with the target in part."""
    return 0.7 * target(prefix) + 0.7 * _logits(prefix, 2)


def _logits(prefix: tuple[int, ...], salt: int) -> torch.Tensor:
    """By the last token alone: what a longer memory spreads over many contexts would average away in the counts."""
    return torch.tensor(np.random.default_rng([salt, prefix[-1]]).normal(size=VOCAB), dtype=torch.float32)


class DraftTable(Table):
    def _logits(self, span: Span) -> list[torch.Tensor]:
        seen = [self.slots[slot] for first, count in span.runs for slot in range(first, first + count)]
        assert len(seen) == span.start + len(span.tokens)
        return [other(tuple(seen))] if span.num_logits else []


class TargetTable:
    """A `Target` whose cache is a token for each slot."""

    launches = False

    def __init__(self) -> None:
        self.slots: dict[int, int] = {}

    def runs_alone(self, num_rows: int, num_logits: int) -> bool:
        return False

    def logits(self, spans: Sequence[Span]) -> RowLogits:
        for span in spans:
            assert span.parents is None  # only chains
            self.slots.update(zip(span.own_slots(), span.tokens, strict=True))
        return RowLogits(torch.stack([row for span in spans for row in self._rows(span)]), VOCAB)

    def launch(self, spans: Sequence[Span]) -> bool:
        raise AssertionError("it does not launch")

    def release(self, tokens: Sequence[int]) -> None:
        raise AssertionError("it does not launch")

    def taps(self) -> None:
        return None

    def move(self, moves: Moves) -> None:
        assert not any(moves)

    def copy(self, copies: Sequence[StateCopy]) -> None:
        assert not copies

    def _rows(self, span: Span) -> list[torch.Tensor]:
        seen = tuple(self.slots[slot] for first, count in span.runs for slot in range(first, first + count))
        return [target(seen[: stop + 1]) for stop in range(len(seen) - span.num_logits, len(seen))]


class Reused(CounterNoise):
    """A drafter's noise that is the coin of the accept test."""

    def best_of(self, scores_S: torch.Tensor, ids_S: torch.Tensor, seed: int, position: int, stream: Stream) -> int:
        u = self.uniform(seed, position, Stream.accept, 0)
        return int(ids_S[int((scores_S.double().softmax(0).cumsum(0) < u).sum().clamp(max=len(ids_S) - 1))])


class Choosy(DrafterEnd):
    """Ends a draft before a token that it holds to be unlikely, though it was drawn."""

    def send(self, message: Drafts) -> None:
        drafts = tuple(msgspec.structs.replace(draft, tree=self._cut(draft.tree)) for draft in message.drafts)
        super().send(msgspec.structs.replace(message, drafts=drafts))

    @staticmethod
    def _cut(tree: TokenTree) -> TokenTree:
        for index, (token, draws) in enumerate(zip(tree.tokens, tree.draws or (), strict=False)):
            if draws is not None and draws.probs[draws.ids.index(token)] < 0.15:
                return tree.pruned(index)
        return tree


def texts(count: int, end: type[DrafterEnd] = DrafterEnd, noise: type[CounterNoise] = CounterNoise) -> Told:
    """What comes out of a world of one rank and a drafter at a wire. end, noise: the drafter's."""

    def drafter(wire: Wire) -> Drafter:
        source = ModelDrafter(noise(), "sampled", VOCAB, support=4)
        pool = PagePool(NUM_RUNNING * 40, 4)
        return Drafter(Ahead(source, DraftTable(VOCAB), pool, Policy(), wire.clock.now), end(wire))

    wire = Wire(drafter, FAULTS, random.Random(1))
    engine = engine_at(wire)
    requests = [Submit(Request(i, PROMPT, LENGTH, Sampling(temperature=1.0, seed=i))) for i in range(count)]
    script = Script({1: requests})
    lead_rounds(engine, OneRankChannel(), script)
    return script.told


def engine_at(wire: Wire) -> Engine:
    pool = PagePool(NUM_RUNNING * 10, 4)
    engine = Engine(
        target=TargetTable(),
        scheduler=Scheduler(pool, max_rows=256, max_running=NUM_RUNNING, fixed_rows=None),
        pool=pool,
        rule=Rejection(),
        noise=CounterNoise(),
        host=RemoteHost(wire, wire.clock.now, [FAN_OUT]),
        draft_tokens=3,
        pace=Pace(gives_odds=True),
        vocab=VOCAB,
        ledger=Ledger(),
        clock=wire.clock.now,
    )
    verify = engine.target.logits

    def logits(spans: Sequence[Span]) -> RowLogits:
        wire.work(wire.chance.randint(0, 6))
        return verify(spans)

    engine.target.logits = logits  # type: ignore[method-assign]
    return engine


@cache
def law() -> dict[tuple[int, ...], float]:
    """Of the judged tokens, decoded one by one."""
    texts = {PROMPT: 1.0}
    for _ in range(JUDGED.stop):
        laws = {text: target(text).double().softmax(0).tolist() for text in texts}
        texts = {(*text, token): p * laws[text][token] for text, p in texts.items() for token in range(VOCAB)}
    found: dict[tuple[int, ...], float] = defaultdict(float)
    for text, p in texts.items():
        found[text[len(PROMPT) :][JUDGED]] += p
    return found


def p_value(told: Told) -> float:
    """Of chi-squared; texts that are expected fewer than five times are counted as one."""
    count = len(told.tokens)
    seen = Counter(tuple(tokens[JUDGED]) for tokens in told.texts())
    wanted = {text: count * p for text, p in law().items()}
    often = [text for text, expected in wanted.items() if expected >= 5]
    pairs = [(seen[text], wanted[text]) for text in often]
    pairs.append((count - sum(n for n, _ in pairs), count - sum(n for _, n in pairs)))
    distance = sum((found - expected) ** 2 / expected for found, expected in pairs)
    return float(torch.special.gammaincc(torch.tensor((len(pairs) - 1) / 2.0), torch.tensor(distance / 2)))


def test_the_law_is_the_targets() -> None:
    """Stands against drafts judged by the q of another token, a draft that is used or left for what it says, and noise
    that serves twice: in what was drafted ahead for one future, and in the round that found another."""
    told = texts(900)
    assert p_value(told) > LEAST_P
    found = told.stats[-1].elsewhere
    assert found is not None
    # Worth something only where all of it occurred.
    assert min(found.hits, found.misses, found.late) > 100
    assert 0.3 * told.stats[-1].drafted < told.stats[-1].accepted < 0.8 * told.stats[-1].drafted


@pytest.mark.parametrize("mutant", [{"end": Choosy}, {"noise": Reused}], ids=["choosy", "reused noise"])
def test_a_drafter_that_breaks_the_law_is_caught(mutant: dict[str, type]) -> None:
    assert p_value(texts(700, **mutant)) < CAUGHT_P
