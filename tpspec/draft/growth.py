"""The possible futures of one text, as a tree that outlives rounds: what came true becomes text, the rest is dropped.

Keys and values of what has been read lie behind the text's own, wherever there was room, and are moved together when
the text grows. Integers and odds only; must not know a model, a policy or where it runs.
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from tpspec.model.batch import Carried, Runs, Span
from tpspec.tokens import ROOT, Branch, TokenTree
from tpspec.verify.occurring import Occurring
from tpspec.verify.rows import Draw

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from tpspec.cache.pages import Pages
    from tpspec.draft.protocol import Ask, Offer
    from tpspec.draft.shapes import Shape
    from tpspec.tokens import Draws
    from tpspec.topology.rank_paths import RankPath


class Node:
    """A token that may come. odds: that it does, if its parent did; path_odds: with all above it; said: by its source.

    children: best first; None until the node has been read. slot: where its keys and values are, counted from the
    sequence's first; None until then. draws: how its first child was drawn, where the source says so.
    """

    __slots__ = ("children", "depth", "draws", "odds", "parent", "path_odds", "said", "slot", "token")

    def __init__(self, token: int, parent: Node | None = None, odds: float = 1.0, said: float = 1.0) -> None:
        self.token, self.parent, self.odds, self.said = token, parent, odds, said
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.path_odds: float = odds if parent is None else odds * parent.path_odds
        self.children: list[Node] | None = None
        self.slot: int | None = None
        self.draws: Draws | None = None

    def child(self, token: int) -> Node | None:
        return next((child for child in self.children or () if child.token == token), None)

    def line(self) -> list[Node]:
        """From below the root down to here."""
        nodes: list[Node] = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def below(self) -> Iterator[Node]:
        """All under it, parents first."""
        for child in self.children or ():
            yield child
            yield from child.below()

    def become_root(self) -> None:
        self.parent, self.depth, self.odds, self.path_odds = None, 0, 1.0, 1.0
        for node in self.below():
            assert node.parent is not None
            node.depth, node.path_odds = node.parent.depth + 1, node.odds * node.parent.path_odds


class Change(NamedTuple):
    """What became of a tree: slots that move (from, to), all read before any is written; and nodes read for nothing."""

    moves: list[tuple[int, int]]
    num_dropped: int


class Growth:
    """The text of one sequence and what may follow it.

    num_read: tokens of the text whose keys and values are cached. Nodes below the root have any only when it is all.
    num_taken: of those, the ones that the model's state of the text has taken in, where it keeps one: all but the last,
    at most, which is read again before every draft.
    """

    def __init__(self, ask: Ask) -> None:
        self.seq, self.num_prompt, self.sampling = ask.seq, ask.num_prompt, ask.sampling
        self.text = list(ask.tokens)
        self._occurring = Occurring.wanted(self.text, self.num_prompt, self.sampling)
        self.root = Node(self.text[-1])
        self.num_read = self.num_taken = 0
        self._num_below = 0  # nodes below the root that have been read

    @property
    def num_slots(self) -> int:
        """Slots of the text and of all that was read below it."""
        return len(self.text) + self._num_below

    def commit(self, tokens: Sequence[int], *, rereads: bool = False) -> Change:
        """The text grows by one token or more. rereads: what was drafted is no use to it, even what came true."""
        if rereads:
            num_below, self._num_below = self._num_below, 0
            self.text.extend(tokens)
            self.root = Node(self.text[-1])
            return Change([], num_below)
        before, num_below, came_true = len(self.text), self._num_below, self.follow(tokens)
        self.text.extend(tokens)
        self.root = came_true[-1] if len(came_true) == len(tokens) else Node(self.text[-1])
        self.root.become_root()
        path = [node for node in came_true if node.slot is not None]
        below = [node for node in self.root.below() if node.slot is not None]
        moves = _moved([*path, *below], before)
        self.num_read += len(path)
        self._num_below = len(below)
        return Change(moves, num_below - len(path) - len(below))

    def chain(self, most: int) -> list[Node]:
        """What a chain would propose: first children from the root down, at most so many."""
        nodes: list[Node] = []
        node = self.root
        while node.children and len(nodes) < most:
            node = node.children[0]
            nodes.append(node)
        return nodes

    def best(self, most: int, branches: int) -> list[Node]:
        """What a tree of at most `most` nodes would propose, `branches` children after each: the likeliest first."""
        if branches == 1:
            return self.chain(most)
        nodes: list[Node] = []
        number = count()  # of the equally likely the one nearest to the root: a parent is never behind its child
        open: list[tuple[float, int, int, Node]] = []
        node = self.root
        while len(nodes) < most:
            for child in (node.children or [])[:branches]:
                heappush(open, (-child.path_odds, child.depth, next(number), child))
            if not open:
                break
            *_, node = heappop(open)
            nodes.append(node)
        return nodes

    def shaped(self, shape: Shape, most: int) -> dict[RankPath, Node]:
        """What there is of a tree of that shape and at most `most` nodes."""
        nodes: dict[RankPath, Node] = {(): self.root}
        for path in shape.paths(most):
            above = nodes.get(path[:-1])
            if above is not None and path[-1] < len(above.children or ()):
                nodes[path] = (above.children or [])[path[-1]]
        del nodes[()]
        return nodes

    def tree(self, most: int, branches: int = 1, shape: Shape | None = None) -> TokenTree:
        """shape: instead of `branches`, and whose odds then are the tree's."""
        if shape is None:
            nodes = self.best(most, branches)
            odds = [node.odds for node in nodes]
        else:
            shaped = self.shaped(shape, most)
            nodes, odds = list(shaped.values()), [shape.odds(path) for path in shaped]
        numbers = {id(node): number for number, node in enumerate(nodes)}
        draws = tuple(node.draws if node.children else None for node in (self.root, *nodes))
        return TokenTree(
            tuple(node.token for node in nodes),
            tuple(numbers.get(id(node.parent), ROOT) for node in nodes),
            draws if any(draw is not None for draw in draws) else None,
            tuple(odds),
        )

    def unread(self) -> Iterator[Node]:
        """Nodes that could be read next."""
        if self.root.children is None:
            yield self.root
        yield from (node for node in self.root.below() if node.children is None)

    def claim(self, node: Node) -> None:
        """A slot for a node that is about to be read; the root has its own, in the text."""
        if node.parent is not None:
            node.slot = self.num_slots
            self._num_below += 1

    def disclaim(self, node: Node) -> None:
        """Takes back the last claim."""
        if node.parent is not None:
            node.slot = None
            self._num_below -= 1

    def span(self, node: Node, pool: Pages) -> Span:
        """The row that reads `node`; with the root, all of the text that has not been read."""
        if node.parent is None:
            return self.chunk(len(self.text), pool, num_logits=1)
        start, size = len(self.text) + node.depth - 1, len(self.text)
        line, recent_line = (self._slots(node.line(), slots) for slots in (pool.slots, pool.recent_slots))
        runs, recent = pool.runs(self.seq, size), pool.recent_runs(self.seq, start, size)
        if recent is not None:
            recent = _followed(recent, recent_line)
        return Span(self.seq, start, (node.token,), _followed(runs, line), 1, recent=recent)

    def branching(self, nodes: Sequence[Node], slot: int, pool: Pages) -> Span:
        """The rows that read `nodes`, the last ones, from a state in that slot: before them the text that it has not
        taken in, of which it takes in all but the root, and what leads from there to these nodes."""
        size, start = len(self.text), self.num_taken
        above = {id(one): one for node in nodes for one in node.line()[:-1]}
        tree = [*above.values(), *(node for node in nodes if node.parent is not None)]
        rows = {id(self.root): size - 1 - start} | {id(node): row for row, node in enumerate(tree, size - start)}
        parents = [*range(-1, size - 1 - start), *(rows[id(node.parent)] for node in tree)]
        return Span(
            self.seq,
            start,
            (*self.text[start:], *(node.token for node in tree)),
            _followed(pool.runs(self.seq, size), self._slots(tree, pool.slots)),
            len(nodes),
            None if parents == list(range(-1, len(parents) - 1)) else tuple(parents),
            carried=Carried(slot, (), size - start),
        )

    def chunk(self, stop: int, pool: Pages, num_logits: int, slot: int | None = None) -> Span:
        """The rows that read the text up to `stop`. slot: of its state, where the model keeps one."""
        start = self.num_read if slot is None else self.num_taken
        runs, recent = pool.runs(self.seq, stop), pool.recent_runs(self.seq, start, stop)
        carried = None if slot is None else Carried(slot, (), stop - start)
        return Span(self.seq, start, tuple(self.text[start:stop]), runs, num_logits, recent=recent, carried=carried)

    def _slots(self, nodes: Iterable[Node], slots: Callable[[int, int, int], list[int]]) -> list[int]:
        """Of nodes that have one."""
        places = [node.slot for node in nodes if node.slot is not None]
        return [slot for at in places for slot in slots(self.seq, at, at + 1)]

    def has_read(self, stop: int) -> None:
        """Its text, up to there."""
        self.num_read, self.num_taken = max(stop, self.num_read), stop - 1

    def draw(self, node: Node) -> Draw:
        """The token after `node`, to be drawn."""
        path = tuple(above.token for above in node.line())
        return Draw(self.text, self.num_prompt, self.sampling, path, occurring=self._occurring)

    def learn(self, node: Node, offer: Offer, odds: Sequence[float]) -> None:
        """`node` has been read. odds: of the tokens on offer, as far as they are to be believed."""
        self.has_read(len(self.text))
        node.draws = offer.draws
        said = zip(offer.tokens, odds, offer.odds, strict=True)
        node.children = [Node(token, node, believed, odds) for token, believed, odds in said]

    def branch(self, node: Node) -> Branch:
        """What is expected after `node`, which has been read."""
        children = node.children or []
        return Branch(
            self.seq,
            len(self.text),
            tuple(above.token for above in node.line()),
            tuple(child.token for child in children),
            tuple(child.odds for child in children),
            node.draws,
        )

    def follow(self, tokens: Sequence[int]) -> list[Node]:
        """The nodes that came true, from below the root on."""
        nodes: list[Node] = []
        node: Node | None = self.root
        for token in tokens:
            node = node.child(token) if node is not None else None
            if node is None:
                break
            nodes.append(node)
        return nodes


def _moved(nodes: Sequence[Node], first: int) -> list[tuple[int, int]]:
    """Gives the nodes the slots from `first` on, in order; from where to where, of those that stood elsewhere."""
    moves: list[tuple[int, int]] = []
    for slot, node in enumerate(nodes, first):
        if node.slot is not None and node.slot != slot:
            moves.append((node.slot, slot))
        node.slot = slot
    return moves


def _followed(runs: Runs, slots: Sequence[int]) -> Runs:
    """Runs, and slots behind them, in as few pieces as can be."""
    joined = list(runs)
    for slot in slots:
        if joined and sum(joined[-1]) == slot:
            joined[-1] = (joined[-1][0], joined[-1][1] + 1)
        else:
            joined.append((slot, 1))
    return tuple(joined)
