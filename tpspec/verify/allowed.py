"""What a grammar allows after a text and the drafts on a path: one more processor, and why some drafts are in vain.

Every answer is a function of (grammar, output so far, drafts); what was read of the output is only remembered, since an
output only grows. A text whose grammar is complete has ended: nothing is said of the rows behind it. Must not know
logits, rules or where drafts come from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from tpspec.tokens import NO_DRAFT, ROOT, TokenTree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from llguidance import LLMatcher
    from numpy.typing import NDArray

    from tpspec.request import FinishReason

    Ids = NDArray[np.bool_]  # [vocabulary]

Answer = TypeVar("Answer")
MOST_FORCED = 16  # tokens that are drafted because no other text may come


class Kept(NamedTuple):
    """What of some tokens stands, and why the text ends with it: None when it goes on.

    "error": the next of them, which no grammar's mask would have let through, was drawn where there was none.
    """

    tokens: tuple[int, ...]
    finish: FinishReason | None


class Constraint:
    """One text under its grammar. begin: makes a matcher that stands before its first token.

    A matcher that has reached a limit, with this text or another of its grammar, says no to everything: what was asked
    of it is asked of a new one. Where that reaches it too, this text, or a draft, is more than can be followed.
    eos_ids: by the matcher, which are replaced by stop_ids: those may come wherever the text may end. num_known: ids of
    the tokenizer; another breaks a matcher. vocab: ids of the target.
    """

    def __init__(
        self,
        begin: Callable[[], LLMatcher],
        eos_ids: Sequence[int],
        stop_ids: frozenset[int],
        num_known: int,
        vocab: int,
    ) -> None:
        self._begin, self._matcher = begin, begin()
        self._eos_ids, self._stop_ids, self._num_known, self._vocab = eos_ids, stop_ids, num_known, vocab
        self._num_read = 0
        self._is_lost = False  # the output is none of the grammar's

    def keep(self, output: Sequence[int], tokens: Sequence[int]) -> Kept:
        """`tokens` come after `output`, which has not ended: up to where it ends, or breaks the grammar."""
        kept, _ = self._asked(output, lambda: self._keep(tokens))
        return kept

    def _keep(self, tokens: Sequence[int]) -> Kept:
        for i, token in enumerate(tokens):
            if self._has_ended:
                return Kept(tuple(tokens[:i]), "stop")
            if self._is_lost or not self._allows(token):
                return Kept(tuple(tokens[:i]), "error")
            if token in self._stop_ids:
                return Kept(tuple(tokens[: i + 1]), "stop")
            self._matcher.try_consume_tokens([token])
            self._num_read += 1
        return Kept(tuple(tokens), "stop" if self._has_ended else None)

    def allowed(self, output: Sequence[int], tree: TokenTree) -> list[Ids | None]:
        """What may be drawn at the root and at each node; None where nothing can be said: see `_mask`."""

        def masks() -> dict[int, Ids | None]:
            return {node: self._mask() for node in self._walk(tree)}

        found, _ = self._asked(output, masks)
        return [found.get(node) for node in range(ROOT, len(tree))]

    def fitting(self, output: Sequence[int], tree: TokenTree) -> TokenTree:
        """The tree without the nodes that can never be accepted.

        Where tokens were drawn, the first one on a path that is forbidden stays: a draw that is dropped for its value
        no longer comes from the q by which its siblings, and what is left of p, are judged.
        """

        def fits() -> list[int]:
            return [
                child
                for node in self._walk(tree)
                for child in tree.children(node)
                if tree.draws is not None or self._allows(tree.tokens[child])
            ]

        found, is_sure = self._asked(output, fits)
        if not is_sure:  # what stands behind a node of it could not be judged
            return tree if tree.draws is not None else NO_DRAFT
        return tree if len(found) == len(tree) else tree.only(sorted(found))

    def draft(self, output: Sequence[int], tree: TokenTree) -> TokenTree:
        """`fitting`, or what the grammar leaves no choice in, where that is longer.

        Drawn tokens stay: which of them are left depends on their values, and then so would whether they are judged.
        """
        fitting = self.fitting(output, tree)
        if self._is_lost or self._has_ended or self._matcher.is_error() or tree.draws is not None:
            return fitting
        forced = self._matcher.compute_ff_tokens()[:MOST_FORCED]
        return TokenTree.chain(forced) if len(forced) > max(fitting.depths(), default=0) else fitting

    @property
    def _has_ended(self) -> bool:
        """Nothing can follow: not even a stop token is needed."""
        return self._matcher.is_stopped() and self._matcher.is_accepting()

    def _read(self, output: Sequence[int]) -> None:
        """Another output than the grammar's own is possible where it was made by somebody else."""
        new = list(output[self._num_read :])
        if new and not self._is_lost:
            num_known = next((i for i, token in enumerate(new) if token >= self._num_known), len(new))
            num_read = self._matcher.try_consume_tokens(new[:num_known])
            self._is_lost = num_read < len(new) and not self._matcher.is_error()
        self._num_read = len(output)

    def _asked(self, output: Sequence[int], question: Callable[[], Answer]) -> tuple[Answer, bool]:
        """The answer of a matcher that has read the output, and whether it is sound: a new one has none else either."""
        self._read(output)
        answer = question()
        if self._matcher.is_error():
            self._matcher, self._num_read = self._begin(), 0
            self._read(output)
            answer = question()
        return answer, not self._matcher.is_error()

    def _allows(self, token: int) -> bool:
        if token in self._stop_ids and self._matcher.is_accepting():
            return True
        is_known = token < self._num_known and token not in self._eos_ids
        return is_known and self._matcher.validate_tokens([token]) == 1

    def _walk(self, tree: TokenTree, node: int = ROOT, *, is_spare: bool = False) -> Iterator[int]:
        """The nodes after which the text goes on, each while the matcher stands there. To be run to its end.

        Copies go down: a rollback takes back too much of a token that a grammar has by its id (guidance-ai/llguidance,
        pull request 364). One that has reached a limit stays, for `_asked` to see. is_spare: nobody needs the matcher
        at the node once the last child has been looked at.
        """
        if self._is_lost or self._has_ended:
            return
        yield node
        here, children = self._matcher, tree.children(node)
        for child in children:
            token = tree.tokens[child]
            if token in self._stop_ids or not self._allows(token):
                continue
            self._matcher = here if is_spare and child == children[-1] else here.deep_copy()
            if self._matcher.try_consume_tokens([token]):
                yield from self._walk(tree, child, is_spare=True)
            if self._matcher.is_error():
                return
            self._matcher = here

    def _mask(self) -> Ids | None:
        """None where not a single token may come: what is drawn there, `keep` refuses."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.zeros(self._vocab, np.bool_)
        known = np.unpackbits(bits, bitorder="little")[: self._vocab]
        allowed[: len(known)] = known
        allowed[[token for token in self._eos_ids if token < self._vocab]] = False
        if self._matcher.is_accepting():
            allowed[[token for token in self._stop_ids if token < self._vocab]] = True
        return allowed if allowed.any() else None
