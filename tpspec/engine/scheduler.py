"""Which rows run in a round, and what becomes of the verdicts. Integers only: no tensors, no ranks, no clock.

A pure function of the calls made, so that every rank that hears the same news makes the same plan without a word.
It must never look at token values to decide what runs: acceptance would depend on it, and the law would be lost.

Running and waiting together always stand in order of arrival: the youngest running sequence is the one to be
preempted, and it goes to the front of the queue. Between `plan` and `commit` every running sequence owns the slots
of all its committed tokens.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from tpspec.cache.pages import BrokenPages, PagePool
from tpspec.engine.plan import Commit, Owed, Plan, fair_shares, tally
from tpspec.engine.reuse import Reuse
from tpspec.engine.sequence import Sequence
from tpspec.engine.text_states import Stateless
from tpspec.grammar import NOTHING_ALLOWED
from tpspec.model.batch import Moves, Span
from tpspec.request import Delta, Request
from tpspec.tokens import NO_DRAFT, NO_TOKEN, ROOT, TokenTree, Verdict
from tpspec.verify.rows import Case

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence as Many

    from tpspec.model.batch import StateCopy
    from tpspec.verify.allowed import Constraint


CORRUPT = "the model computed no finite logits for this request"


class Scheduler:
    """max_rows: rows of one forward; fixed_rows, when every round is padded to one row count, caps it further.

    max_running: sequences that own pages at a time; never more than there are rows, so that every root runs in every
    round, nobody has to take turns, and a prompt always finds a row. max_positions: of the model, None where it does
    not say. The pool is the scheduler's; what drafts have taken of it beyond the texts, it takes back before it plans.
    reuses: whether a text may begin with pages that others have read. states: of a model that keeps some.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        max_rows: int,
        max_running: int,
        fixed_rows: int | None,
        max_positions: int | None = None,
        reuses: bool = False,
        states: Stateless | None = None,
    ) -> None:
        self._budget = max_rows if fixed_rows is None else min(max_rows, fixed_rows)
        if self._budget < 1 or max_running < 1:
            raise ValueError(f"nothing could ever run: {self._budget} rows, {max_running} sequences")
        self._pool, self._states = pool, states or Stateless()
        self.reuse = Reuse(pool, self._states, is_on=reuses and self._states.shares)
        self.max_running = min(max_running, self._budget)
        self._num_slots = pool.num_pages * pool.page_size
        self._max_positions = self._num_slots if max_positions is None else max_positions
        self._running: dict[int, Sequence] = {}
        self._waiting: deque[Sequence] = deque()
        self._num_preemptions = self._num_corrupted = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_preemptions(self) -> int:
        return self._num_preemptions

    @property
    def num_corrupted(self) -> int:
        """Requests that ended because nothing could be drawn from their logits."""
        return self._num_corrupted

    @property
    def is_idle(self) -> bool:
        return not self._running and not self._waiting

    @property
    def capacity_tokens(self) -> int:
        """The longest prompt and output that can be served."""
        return min(self._num_slots, self._max_positions)

    def fits(self, request: Request) -> bool:
        """Whether it could be served if it were alone."""
        return len(request.prompt) + request.max_tokens <= self.capacity_tokens

    def submit(self, request: Request, constraint: Constraint | None = None) -> Delta | None:
        """Queue the request; one that can never be served, or asks for nothing, is not queued: the delta says why."""
        if request.id in self._running or any(seq.id == request.id for seq in self._waiting):
            raise ValueError(f"request {request.id} was submitted twice")
        if fault := self._fault(request):
            return Delta(request.id, (), finish="error", error=fault)
        if request.max_tokens == 0 and not request.prompt_logprobs:
            return Delta(request.id, (), finish="length")
        self._waiting.append(Sequence(request, constraint))
        return None

    def cancel(self, request_id: int) -> None:
        """Forget the request and free its pages at once; unknown ids are ignored."""
        if self._running.pop(request_id, None) is not None:
            self._pool.release(request_id)
            self._states.release(request_id)
        else:
            self._waiting = deque(seq for seq in self._waiting if seq.id != request_id)

    def ready(self) -> list[Sequence]:
        """Sequences that can verify a tree in the next round, oldest first."""
        return [seq for seq in self._running.values() if seq.is_ready]

    def running(self, seqs: Iterable[int]) -> list[Sequence]:
        """These sequences, all of which own pages."""
        return [self._running[seq] for seq in seqs]

    def plan(self, trees: Mapping[int, TokenTree], held: Collection[int] = (), ahead: Many[Span] = ()) -> Plan:
        """The spans and cases of the next round; trees of sequences that cannot use one are ignored.

        held: sequences that sit this round out, unless they have a prompt to read. ahead: spans that were foreseen,
        with their tokens: the round is they, with the rows of those that have ended meanwhile, if nothing else has
        changed. Who came then waits for that one round: nothing is foreseen in it.
        """
        if ahead and not held and self._goes_on(ahead):
            cases, owed = self._cases(ahead, {})
            gone = [span.seq for span in ahead if span.seq not in self._running]
            return Plan(tuple(ahead), cases, owed=owed, gone=tuple(gone))
        for seq in self._running.values():
            self._pool.shrink(seq.id, seq.num_tokens)
            self._pool.pass_by(seq.id, seq.num_cached)
        self._secure_roots()
        admitted, copies = self._admit()
        verifying = [seq for seq in self.ready() if seq.id not in held]
        behind = [seq for seq in self._running.values() if not seq.is_ready]
        left = self._budget - len(verifying)
        # Trees would otherwise take every row, round after round, while a new prompt waits for an old text to end.
        for_chunks = min(sum([seq.num_uncached for seq in behind]), (left + 1) // 2)
        spans, cut = self._verification_spans(verifying, trees, left - for_chunks)
        spans += self._chunk_spans(behind, self._budget - sum(len(span.tokens) for span in spans))
        cases, owed = self._cases(spans, cut)
        return Plan(tuple(spans), cases, tuple(admitted), owed, tuple(copies))

    def foresee(self, plan: Plan) -> list[Span]:
        """The spans of the round after this one, but for their tokens, where every text that runs goes on by one token:
        they are known before the verdicts are. Empty where they are not. Their rows have slots from now on."""
        may_admit = self._waiting and self.num_running < self.max_running  # or who waits would wait for ever
        if may_admit or not self._states.is_foreseen or len(plan.cases) < self.num_running:
            return []
        if any(len(span.tokens) > 1 for span in plan.spans):
            return []
        going = [(seq.id, seq.num_tokens) for seq in self._running.values() if seq.remaining > 1]
        for seq, root in going:
            if not self._pool.can_grow(seq, root + 1):
                return []
            self._pool.grow(seq, root + 1)
        for seq, root in going:
            self._pool.pass_by(seq, root)
        for seq, root in going:
            self._pool.grow_recent(seq, root + 1)
        return [
            Span(
                seq, root, (NO_TOKEN,), self._pool.runs(seq, root + 1), 1,
                recent=self._pool.recent_runs(seq, root, root + 1),
            )
            for seq, root in going
        ]  # fmt: skip

    def commit(self, plan: Plan, verdicts: Iterable[Verdict]) -> Commit:
        """Lengths move, texts grow, finished sequences leave. Sequences cancelled since the plan are passed over."""
        commit = Commit()
        judged = {verdict.seq: verdict for verdict in verdicts}
        for owed in plan.owed:
            if owed.seq in self._running:
                self._running[owed.seq].num_scored += len(owed.prompt)
        for span in plan.spans:
            if span.seq not in judged and span.seq in self._running:
                seq = self._running[span.seq]
                seq.num_cached = span.start + len(span.tokens)
                self.reuse.keep(seq)
                commit.copies.extend(self._states.has_read(seq))
        for case in plan.cases:
            if case.seq in self._running:
                self._settle(self._running[case.seq], case.tree, judged[case.seq], commit)
        return commit

    def check_integrity(self) -> None:
        """Raises BrokenPages unless pages belong to running sequences only and cover what those have cached."""
        self._pool.check_integrity()
        for owner in self._pool.owners:
            if owner not in self._running:
                raise BrokenPages(f"sequence {owner} is not running and owns {self._pool.num_slots(owner)} slots")
        for seq in self._running.values():
            if not 0 <= seq.num_cached <= min(seq.num_tokens - 1, self._pool.num_slots(seq.id)):
                owned = self._pool.num_slots(seq.id)
                raise BrokenPages(f"sequence {seq.id}: {seq.num_cached} of {seq.num_tokens} cached in {owned} slots")

    def _fault(self, request: Request) -> str | None:
        if not request.prompt:
            return "the prompt is empty"
        if request.max_tokens < 0:
            return f"max_tokens is {request.max_tokens}; it must be at least 0"
        if not self.fits(request):
            asked = f"{len(request.prompt)} prompt tokens and max_tokens {request.max_tokens}"
            if self._max_positions < self._num_slots:
                return f"{asked} are more than the {self._max_positions} positions of the model"
            return f"{asked} do not fit the cache of {self._num_slots} tokens"
        return None

    # Pages

    def _secure_roots(self) -> None:
        """Slots for every committed token of every running sequence, elders first; the youngest make room.

        Who has to go is not admitted again in the same round: he would need all that he had, and an elder took some.
        """
        for seq in list(self._running.values()):
            if self._pool.num_slots(seq.id) >= seq.num_tokens:
                continue
            while seq.id in self._running and not self._pool.can_grow(seq.id, seq.num_tokens):
                self._preempt_youngest()
            if seq.id in self._running:
                self._pool.grow(seq.id, seq.num_tokens)

    def _preempt_youngest(self) -> None:
        _, seq = self._running.popitem()
        self._set_back(seq)
        self._waiting.appendleft(seq)
        self._num_preemptions += 1

    def _set_back(self, seq: Sequence) -> None:
        self._pool.release(seq.id, returns=True)
        self._states.release(seq.id)
        seq.num_cached = seq.num_kept = 0

    def _admit(self) -> tuple[list[int], list[StateCopy]]:
        """The whole prefix is reserved at once, so that it is contiguous and chunks never run out of pages.

        Who begins as an elder does waits until that has been read: he would only read it a second time, and later.
        """
        admitted: list[int] = []
        copies: list[StateCopy] = []
        while self._waiting and self.num_running < self.max_running:
            seq = self._waiting[0]
            headroom = min(seq.num_tokens + self._pool.page_size, seq.max_total)
            num_known = self.reuse.take(seq)
            if not self._pool.can_grow(seq.id, headroom) or self.reuse.is_near(seq, self._running.values()):
                self._set_back(seq)
                break
            self.reuse.count(seq)
            self._pool.grow(seq.id, seq.num_tokens)
            copies += self._states.begin(seq, num_known)
            self._running[seq.id] = self._waiting.popleft()
            admitted.append(seq.id)
        return admitted, copies

    # Rows

    def _verification_spans(
        self, verifying: list[Sequence], trees: Mapping[int, TokenTree], num_rows: int
    ) -> tuple[list[Span], dict[int, TokenTree]]:
        """A span for each sequence, with at most num_rows tree nodes in all; and the trees as they were cut."""
        if not trees:
            return [self._span(seq, (seq.root,), NO_DRAFT) for seq in verifying], {}
        useful = [
            NO_DRAFT if seq.is_doubtful else trees.get(seq.id, NO_DRAFT).up_to_depth(seq.remaining - 1)
            for seq in verifying
        ]
        shares = fair_shares([len(tree.tokens) for tree in useful], num_rows)
        spans: list[Span] = []
        cut: dict[int, TokenTree] = {}
        for seq, tree, share in zip(verifying, useful, shares, strict=True):
            room = self._pool.num_reachable(seq.id) - seq.num_tokens  # a tree never preempts anybody
            cut[seq.id] = tree = tree.pruned(min(share, self._states.most_nodes(room)))
            spans.append(self._span(seq, (seq.root, *tree.tokens), tree))
        return spans, cut

    def _chunk_spans(self, behind: list[Sequence], num_rows: int) -> list[Span]:
        spans: list[Span] = []
        for seq in behind:
            if num_rows == 0:
                break
            stop = min(seq.num_cached + num_rows, seq.num_tokens)
            stop = self._states.next_stop(seq.id, seq.num_cached, stop)
            spans.append(self._span(seq, tuple(seq.tokens[seq.num_cached : stop]), NO_DRAFT))
            num_rows -= stop - seq.num_cached
        return spans

    def _span(self, seq: Sequence, tokens: tuple[int, ...], tree: TokenTree) -> Span:
        stop = seq.num_cached + len(tokens)
        self._pool.grow(seq.id, stop)
        self._pool.grow_recent(seq.id, stop)
        parents = None if tree.is_chain else (ROOT, *(parent + 1 for parent in tree.parents))
        num_judged = 1 + len(tree) if stop >= seq.num_tokens else 0
        unscored = seq.unscored(stop)
        num_logits = stop - unscored.start if unscored else num_judged
        recent = self._pool.recent_runs(seq.id, seq.num_cached, stop)
        carried = self._states.carried(seq.id, len(tokens) - len(tree))
        runs = self._pool.runs(seq.id, stop)
        return Span(seq.id, seq.num_cached, tokens, runs, num_logits, parents, recent, carried)

    def _goes_on(self, ahead: Many[Span]) -> bool:
        """Whether these are the next rows of all that run."""
        alive = [(self._running[span.seq], span) for span in ahead if span.seq in self._running]
        if not alive or len(alive) < self.num_running:
            return False
        return all(seq.is_ready and span.start == seq.num_cached and span.tokens == (seq.root,) for seq, span in alive)

    def _cases(self, spans: Many[Span], trees: Mapping[int, TokenTree]) -> tuple[tuple[Case, ...], tuple[Owed, ...]]:
        """Rows of who has ended are passed over."""
        cases: list[Case] = []
        owed: list[Owed] = []
        row = 0
        for span in spans:
            if span.seq not in self._running:
                row += span.num_logits
                continue
            seq, stop = self._running[span.seq], span.start + len(span.tokens)
            if seq.request.logprobs is not None and span.num_logits:
                unscored = seq.unscored(stop)
                prompt = tuple(seq.tokens[unscored.start + 1 : unscored.stop + 1]) if unscored else ()
                owed.append(Owed(seq.id, row, prompt, seq.request.logprobs))
            row += span.num_logits
            if stop >= seq.num_tokens:
                tree = trees.get(seq.id, NO_DRAFT)
                first = row - 1 - len(tree)  # rows before it read the prompt
                text = seq.tokens, seq.num_prompt, seq.sampling
                cases.append(Case(seq.id, first, tree, *text, seq.constraint, seq.occurring))
        return tuple(cases), tuple(owed)

    # Verdicts

    def _settle(self, seq: Sequence, tree: TokenTree, verdict: Verdict, commit: Commit) -> None:
        tokens, finish = seq.truncated(verdict.tokens)
        drafted, accepted = tally(tree, min(len(verdict.path), len(tokens)))
        seq.is_doubtful = verdict.corrupt
        if verdict.corrupt and not tree:
            commit.deltas.append(Delta(seq.id, (), "error", error=CORRUPT))
            self._end_corrupt(seq, commit)
            return
        error = NOTHING_ALLOWED if finish == "error" else None
        num_cached = 0 if seq.num_output else seq.num_found or 0
        commit.deltas.append(Delta(seq.id, tokens, finish, drafted, accepted, error, num_cached=num_cached))
        path = verdict.path[: len(tokens)]
        self._move_path(seq, path, commit.moves)
        root = seq.num_tokens - 1
        seq.num_cached = seq.num_tokens + len(path)  # the root, and behind it the accepted path
        seq.tokens.extend(tokens)
        if verdict.corrupt:
            seq.num_cached = seq.num_tokens - 1  # once more, without drafts: rows beside it must not decide its fate
        else:
            self.reuse.keep(seq)
        rows = (0, *[node + 1 for node in path])[: seq.num_cached - root]
        commit.copies.extend(self._states.has_gone_on(seq, rows))
        if finish is not None:
            commit.finished.append(seq.id)
            self.cancel(seq.id)
            return
        self._pool.shrink(seq.id, seq.num_tokens)

    def _end_corrupt(self, seq: Sequence, commit: Commit) -> None:
        self._num_corrupted += 1
        self.reuse.spoil(seq)
        commit.finished.append(seq.id)
        self.cancel(seq.id)

    def _move_path(self, seq: Sequence, path: tuple[int, ...], moves: Moves) -> None:
        """Node i was written i + 1 slots behind the root; the accepted node of depth d belongs d slots behind it.

        A path never moves forward, so an earlier copy in the lists is never undone by a later one.
        """
        if not path or path[-1] == len(path) - 1:
            return
        moved = [(node, depth) for depth, node in enumerate(path) if node != depth]
        behind_root = seq.num_tokens, seq.num_tokens + path[-1] + 1
        slots, recent = self._pool.slots(seq.id, *behind_root), self._pool.recent_slots(seq.id, *behind_root)
        moves.src.extend(slots[node] for node, _ in moved)
        moves.dst.extend(slots[depth] for _, depth in moved)
        if recent:
            moves.recent_src.extend(recent[node] for node, _ in moved)
            moves.recent_dst.extend(recent[depth] for _, depth in moved)
