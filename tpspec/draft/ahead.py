"""Drafting with a model, before or after the verdict is known: which token is read next, and when an answer is good.

Every text has a tree of futures (growth.py). A text that waits for an answer has its chain read on until more does not
pay; a policy that drafts ahead reads on meanwhile, the likeliest futures first, so that the next verdict finds its
answer ready. `serial`: never ahead. `optimistic`: ahead along what was proposed, as if all were accepted. `fan_out`:
ahead wherever the text may go. Must not know ranks, messages or what the model is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tpspec.cache.pages import OutOfPages
from tpspec.draft.growth import Growth, Node
from tpspec.draft.outlook import Outlook
from tpspec.draft.protocol import Needs, Place
from tpspec.draft.reading import ByRow, ByText
from tpspec.draft.record import Calibration
from tpspec.draft.row_cost import RowCost
from tpspec.draft.shapes import rank_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tpspec.cache.pages import Pages
    from tpspec.draft.protocol import Ask, Extender, Pays, Run, Taps
    from tpspec.draft.shapes import Shape
    from tpspec.tokens import Branch, TokenTree, Verdict

MAX_ROWS = 256  # of one forward; a longer text is read in pieces
FEW_ROWS = 32  # a forward of more says nothing about what a token costs
FLOOR = 0.01  # a future less likely than that is not worth a row


@dataclass(frozen=True, slots=True)
class Policy:
    """ahead: whether anything is read that nobody has asked for. width: tokens that are kept after each.

    max_rows: futures read at a time. branches: children of a node that an answer may hold; 1 makes chains. shape: of
    every answer; None where the likeliest nodes make it.
    """

    ahead: bool = False
    width: int = 1
    max_rows: int = 8
    branches: int = 1
    shape: Shape | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """The tree for a text of `base` tokens. foreseen: it was there when the text came."""

    seq: int
    base: int
    tree: TokenTree
    foreseen: bool


@dataclass(slots=True)
class _Due:
    """An ask without an answer."""

    ask: Ask
    foreseen: bool


class Ahead:
    """Trees for asks, from a source with a model of its own.

    clock: with one, the price of a draft token is measured here; without, it is what the asks say it is, so that ranks
    that draft the same thing go equally far. borrows: the cache is the target's, where all of a text is read but its
    root; what is drafted is read behind it, and is gone once the text has moved on.
    """

    def __init__(
        self,
        source: Extender,
        run: Run,
        pool: Pages,
        policy: Policy,
        clock: Callable[[], float] | None = None,
        *,
        borrows: bool = False,
    ) -> None:
        self.source, self.run, self.policy = source, run, policy
        self._pool, self._clock, self._borrows = pool, clock, borrows
        self._reading = ByRow() if run.seats is None else ByText(run.seats)
        self._outlook = Outlook()
        self._cost = RowCost()
        self._record = Calibration()
        self._growths: dict[int, Growth] = {}
        self._horizon: dict[int, int] = {}  # how deep below the root a future may still serve the next answer
        self._due: dict[int, _Due] = {}
        self._stuck: set[int] = set()  # no room in the cache until the text has moved on
        self._foreign: set[int] = set()  # with a token that the model has no row for, as padding of the target's
        self._branches: list[Branch] = []
        self.num_read = self.num_dropped = 0

    def hear(self, ask: Ask, *, answered: bool = False) -> None:
        """A text and what it wants. What was foreseen of it stays, all else about it is dropped.

        answered: it has its answer already, from `branches`.
        """
        growth = self._growths.get(ask.seq)
        least = 0 if growth is None else len(growth.text) + self._borrows
        if growth is None or len(ask.tokens) < least or ask.tokens[len(growth.text) - 1] != growth.text[-1]:
            self._drop(ask.seq)
            growth = self._growths[ask.seq] = Growth(ask)
            new = ask.tokens
        elif new := ask.tokens[len(growth.text) :]:
            self._commit(growth, new)
        if max(new, default=0) >= self.run.vocab:
            self._foreign.add(ask.seq)
        if self._borrows:
            growth.num_read = len(growth.text) - 1
        self._stuck.discard(ask.seq)
        self._horizon[ask.seq] = 2 * ask.num_tokens + 1
        self._due.pop(ask.seq, None)
        if not answered:
            self._due[ask.seq] = _Due(ask, foreseen=growth.root.children is not None)

    def forget(self, seq: int) -> None:
        self._drop(seq)
        self.run.forget(seq)

    def observe(self, taps: Taps) -> None:
        """Before `hear`: what the target made of the text that will be told."""
        self.run.observe(taps)

    def text(self, seq: int) -> Sequence[int]:
        """What is known of a sequence; nothing of one that is unknown."""
        growth = self._growths.get(seq)
        return () if growth is None else growth.text

    def answers(self) -> list[Answer]:
        """What is ready; each ask is answered once."""
        ready = [due for due in self._due.values() if not self._wanted(due)]
        for due in ready:
            del self._due[due.ask.seq]
        return [self._answer(due) for due in ready]

    def branches(self) -> list[Branch]:
        """What has been read since this was last asked, as far as it is drafted ahead."""
        branches, self._branches = self._branches, []
        return branches

    def work(self) -> bool:
        """Reads once, what is wanted most. Whether there was anything to read."""
        wanted = [(self._growths[seq], node) for seq, due in self._due.items() for node in self._wanted(due)]
        chosen = wanted or self._unread() or self._futures()
        if not chosen:
            return False
        begin = self._clock() if self._clock else 0.0
        long = [growth for growth, _ in chosen if len(growth.text) - growth.num_read > MAX_ROWS]
        if long:
            self._read_chunk(long[0])
        else:
            num_rows = self._read(chosen[:MAX_ROWS])
            if self._clock and 0 < num_rows <= FEW_ROWS:
                self._cost.add(num_rows, self._clock() - begin)
        return True

    def _drop(self, seq: int) -> None:
        """What was read of a text; what the target made of it stays."""
        self._growths.pop(seq, None)
        self._horizon.pop(seq, None)
        self._due.pop(seq, None)
        self._stuck.discard(seq)
        self._foreign.discard(seq)
        self._pool.release(seq)
        self._reading.release(seq)

    # What is wanted

    def _wanted(self, due: _Due) -> list[Node]:
        """What should be read before the answer is given; nothing where it is as good as it should be."""
        growth, ask = self._growths[due.ask.seq], due.ask
        best, ends = self._best(growth, ask.num_tokens)
        is_full = len(best) == ask.num_tokens
        open = [
            node
            for node in ends[: self.policy.max_rows]
            if node.depth < ask.num_tokens
            and not (is_full and self._outlook.next * node.path_odds <= best[-1].path_odds)
            and self._is_readable(growth, node)
        ]
        if not open or ask.costs is None:
            return open
        each = ask.costs.row_s + (self._shared_s(len(open)) if self._clock else ask.costs.draft_s)
        gain = self._outlook.next * sum(node.path_odds for node in open)
        pays = gain > len(open) * each * self._rate(ask.costs, best, each)
        return open if pays or (self._outlook.tries and open == [growth.root]) else []

    def _best(self, growth: Growth, most: int) -> tuple[list[Node], list[Node]]:
        """What an answer would hold of what has been read, and what would have to be read for more."""
        if growth.root.children is None:
            return [], [growth.root]
        if self.policy.shape is None:
            best = growth.best(most, self.policy.branches)
            return best, [node for node in best if node.children is None]
        shaped = growth.shaped(self.policy.shape, most)
        inner = {path[:-1] for path in self.policy.shape.paths(most)}
        return list(shaped.values()), [node for path, node in shaped.items() if path in inner and node.children is None]

    def _shared_s(self, num_rows: int) -> float:
        """Of a forward, what a row of one of the texts that wait for it has to answer for."""
        num_rows *= len(self._due)
        return self._cost.seconds(num_rows) / num_rows

    def _rate(self, costs: Pays, best: Sequence[Node], each: float) -> float:
        """Tokens a second that waiting for one more has to beat: those of late, or of this round alone."""
        if costs.rate:
            return costs.rate
        tokens = 1 + sum(node.path_odds for node in best)
        return tokens / (costs.seconds(1) + each * len(best))

    def _answer(self, due: _Due) -> Answer:
        growth = self._growths[due.ask.seq]
        if due.ask.num_tokens and due.ask.costs is not None:
            self._outlook.answered(drafted=growth.root.children is not None)
        tree = growth.tree(due.ask.num_tokens, self.policy.branches, self.policy.shape)
        return Answer(growth.seq, len(growth.text), tree, due.foreseen)

    def _unread(self) -> list[tuple[Growth, Node]]:
        """A text that somebody will ask about: nothing can be drafted before it has been read."""
        unread = (growth for growth in self._growths.values() if growth.root.children is None)
        return [(growth, growth.root) for growth in unread if self._is_readable(growth, growth.root)][:1]

    def _futures(self) -> list[tuple[Growth, Node]]:
        """The likeliest of what may come, as many as are worth reading together."""
        if not self.policy.ahead:
            return []
        open = [
            (node.path_odds, growth, node)
            for growth in self._growths.values()
            if growth.root.children is not None
            for node in growth.unread()
            if node.path_odds >= FLOOR and node.depth < self._horizon[growth.seq] and self._is_readable(growth, node)
        ]
        open.sort(key=lambda one: -one[0])
        size = self._worth_reading([odds for odds, _, _ in open[: self.policy.max_rows]])
        return [(growth, node) for _, growth, node in open[:size]]

    def _worth_reading(self, odds: Sequence[float]) -> int:
        """How many of these, best first: one more as long as it is likelier, for its time, than those before it."""
        size, hoped = 0, 0.0
        for odd in odds:
            if size and odd * self._cost.seconds(size) < self._cost.row_s * hoped:
                break
            size += 1
            hoped += odd
        return size

    def _is_readable(self, growth: Growth, node: Node) -> bool:
        """Whether there is room in the cache, and the model was made for such tokens, and texts of that length."""
        limit, size = self.run.max_positions, len(growth.text)
        is_shut = growth.seq in self._stuck or growth.seq in self._foreign
        fits = not is_shut and (limit is None or size + node.depth <= limit)
        return fits and self._reading.can_hold(growth, node) and self.run.can_read(growth.seq, size)

    # Reading

    def _read(self, chosen: Sequence[tuple[Growth, Node]]) -> int:
        """Reads what there is room for; how many rows that were."""
        held = [(growth, node) for growth, node in self._reading.together(chosen) if self._hold(growth, node)]
        if not held:
            return 0
        spans = self._reading.spans(held, self._pool)
        width = max(self.policy.width, self.policy.branches)
        places = [Place(growth.seq, growth.draw(node), width) for growth, node in held]
        offers = self.source.extend(spans, places, self.run)
        for (growth, node), offer in zip(held, offers, strict=True):
            growth.learn(node, offer, [self._record.odds(said) for said in offer.odds])
            if self.policy.ahead:
                self._branches.append(growth.branch(node))
        self.num_read += len(held)
        return sum(len(span.tokens) for span in spans)

    def _read_chunk(self, growth: Growth) -> None:
        """Part of a long text."""
        if self._hold(growth, growth.root):
            stop = growth.num_read + MAX_ROWS
            self.run([self._reading.chunk(growth, stop, self._pool)])
            growth.has_read(stop)

    def _hold(self, growth: Growth, node: Node) -> bool:
        """A slot for it. Without one the text is left alone until it has moved on, and waits for nothing."""
        if not self._reading.admit(growth.seq):
            self._stuck.add(growth.seq)
            return False
        growth.claim(node)
        try:
            self._pool.grow(growth.seq, growth.num_slots)
        except OutOfPages:
            growth.disclaim(node)
            self._stuck.add(growth.seq)
            if growth.root.children is None and not self._borrows:  # unreadable: what it holds is of use to others
                self._pool.release(growth.seq)
                growth.num_read = growth.num_taken = 0
            return False
        return True

    def _judge(self, growth: Growth, tokens: Sequence[int]) -> None:
        """What came, against what was offered."""
        steps = zip([growth.root, *growth.follow(tokens)], tokens, strict=False)
        offered = [(above.children, token) for above, token in steps if above.children]
        for children, token in offered:
            self._outlook.saw(right=children[0].token == token)
            for child in children:
                self._record.add(child.said, right=child.token == token)
        if self.policy.shape is not None and offered:
            self.policy.shape.saw([rank_of(token, [child.token for child in children]) for children, token in offered])

    def _commit(self, growth: Growth, tokens: Sequence[int]) -> None:
        self._judge(growth, tokens)
        change = growth.commit(tokens, rereads=self.run.rereads)
        self.num_dropped += change.num_dropped
        if change.moves:
            slots = self._pool.slots(growth.seq, 0, self._pool.num_slots(growth.seq))
            self.run.move([slots[old] for old, _ in change.moves], [slots[new] for _, new in change.moves])
        self._pool.shrink(growth.seq, growth.num_slots)


class Grown:
    """A source with a model of its own as a `Drafter`: asked and answered at once, beside the target."""

    def __init__(self, ahead: Ahead) -> None:
        self._ahead = ahead
        needs = ahead.source.needs
        self.needs = Needs(own_model=True, gives_q=needs.gives_q, gives_odds=True, taps=needs.taps)

    def propose(self, asks: Sequence[Ask]) -> list[TokenTree]:
        for ask in asks:
            self._ahead.hear(ask)
        trees: dict[int, TokenTree] = {}
        while True:
            trees.update((answer.seq, answer.tree) for answer in self._ahead.answers())
            if len(trees) == len(asks):
                return [trees[ask.seq] for ask in asks]
            self._ahead.work()

    def observe(self, verdicts: Sequence[Verdict], taps: Taps | None) -> None:
        """The next ask holds the committed tokens."""
        if taps is not None:
            self._ahead.observe(taps)

    def forget(self, seq: int) -> None:
        self._ahead.forget(seq)
