"""The registry: every draft source by name, what it needs before it is made, and how it is made.

To add a source: its file, and one entry here. Nobody outside this room asks what a source is called.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from inspect import Parameter, signature
from typing import TYPE_CHECKING

from tpspec.draft.model import ModelDrafter
from tpspec.draft.ngram import Ngram
from tpspec.draft.protocol import Needs
from tpspec.errors import UserError
from tpspec.tokens import NO_DRAFT, TokenTree

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tpspec.draft.protocol import Ask, Drafter, Extender, Taps
    from tpspec.tokens import Verdict
    from tpspec.verify.noise import Noise

NEEDS_Q = "rejection"  # the one rule that must be told what a draft was drawn from


class Silent:
    """Never proposes anything: plain decoding."""

    needs = Needs()

    def propose(self, asks: Sequence[Ask]) -> list[TokenTree]:
        return [NO_DRAFT] * len(asks)

    def observe(self, verdicts: Sequence[Verdict], taps: Taps | None) -> None:
        return

    def forget(self, seq: int) -> None:
        return


@dataclass(frozen=True, slots=True)
class Source:
    """A kind of drafter. own_model: it is an `Extender`, to be handed the `Run` of a model of its own.

    maker: takes what the house gives every source, and the options of this one as keywords (whole numbers).
    """

    name: str
    about: str
    own_model: bool
    maker: Callable[..., Drafter | Extender]

    @property
    def options(self) -> dict[str, int]:
        """The options of this source and their defaults."""
        keywords = signature(self.maker).parameters.values()
        return {option.name: option.default for option in keywords if option.kind is Parameter.KEYWORD_ONLY}

    def make(self, *, noise: Noise, accept: str, vocab: int, **options: int) -> Drafter | Extender:
        """accept: the rule's name. vocab: ids of the target. Raises UserError for an option that is not one of its."""
        unknown = sorted(options.keys() - self.options.keys())
        if unknown:
            allowed = ", ".join(self.options) or "none"
            raise UserError(f"draft source {self.name} has no option {unknown[0]!r}; its options: {allowed}")
        try:
            return self.maker(noise, accept, vocab, **options)
        except ValueError as error:
            raise UserError(f"draft source {self.name}: {error}") from error


def _silent(noise: Noise, accept: str, vocab: int) -> Drafter:
    return Silent()


def _ngram(noise: Noise, accept: str, vocab: int, *, min_match: int = 1, floor: int = 10) -> Drafter:
    return Ngram(min_match=min_match, floor=floor)


def _model(noise: Noise, accept: str, vocab: int, *, support: int = 64) -> Extender:
    return ModelDrafter(noise, "sampled" if accept == NEEDS_Q else "coupled", vocab, support)


SOURCES = {
    source.name: source
    for source in (
        Source("none", "no drafts: plain decoding", own_model=False, maker=_silent),
        Source("ngram", "what followed these tokens earlier in prompt and output", own_model=False, maker=_ngram),
        Source("model", "a small model with the target's vocabulary", own_model=True, maker=_model),
    )
}


def source(name: str) -> Source:
    """The source called `name`. Raises UserError with the choices."""
    if name in SOURCES:
        return SOURCES[name]
    near = get_close_matches(name, SOURCES, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise UserError(f"no draft source is called {name!r}{hint}; there are {', '.join(SOURCES)}")
