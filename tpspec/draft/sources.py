"""The registry: how every draft source is made, by name. topology/sources.py has the same names and where they may run.

To add a source: its file, one entry here and one there. Nobody outside this room asks what a source is called.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from inspect import Parameter, signature
from typing import TYPE_CHECKING

from tpspec.draft.model import ModelDrafter
from tpspec.draft.ngram import Ngram
from tpspec.draft.protocol import Modelled, Needs
from tpspec.draft.run import load_run
from tpspec.errors import UserError
from tpspec.tokens import NO_DRAFT, TokenTree

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tpspec.draft.protocol import Ask, Drafter, Given, Taps
    from tpspec.tokens import Verdict

Option = int | float | str
NEEDS_Q = "rejection"  # the one rule that must be told what a draft was drawn from


class Silent:
    """Never proposes anything: plain decoding."""

    needs = Needs()

    def propose(self, asks: Sequence[Ask]) -> list[TokenTree]:
        return [NO_DRAFT] * len(asks)

    def observe(self, verdicts: Sequence[Verdict], taps: Taps | None) -> None: ...
    def forget(self, seq: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Source:
    """A kind of drafter. maker: takes what the house gives every source, and the options of this one as keywords."""

    name: str
    about: str
    maker: Callable[..., Drafter | Modelled]

    @property
    def options(self) -> dict[str, Option]:
        """The options of this source and their defaults."""
        keywords = signature(self.maker).parameters.values()
        return {option.name: option.default for option in keywords if option.kind is Parameter.KEYWORD_ONLY}

    def make(self, given: Given, **options: Option) -> Drafter | Modelled:
        """Raises UserError for an option that is not one of its."""
        for name, value in options.items():
            self._check(name, value)
        try:
            return self.maker(given, **options)
        except ValueError as error:
            raise UserError(f"draft source {self.name}: {error}") from error

    def _check(self, name: str, value: Option) -> None:
        if name not in self.options:
            allowed = ", ".join(self.options) or "none"
            raise UserError(f"draft source {self.name} has no option {name!r}; its options: {allowed}")
        default = self.options[name]
        if not isinstance(value, (int, float) if isinstance(default, float) else type(default)):
            raise UserError(f"draft source {self.name}: {name} is {value!r}; should be like {default!r}")


def _silent(given: Given) -> Drafter:
    return Silent()


def _ngram(given: Given, *, min_match: int = 1, floor: int = 10) -> Drafter:
    return Ngram(min_match=min_match, floor=floor)


def _model(given: Given, *, support: int = 64) -> Modelled:
    return Modelled(coupled_or_sampled(given, support), load_run(given))


def coupled_or_sampled(given: Given, support: int = 64) -> ModelDrafter:
    """What makes drafts of logits, as the rule wants them drawn."""
    return ModelDrafter(given.noise, "sampled" if given.accept == NEEDS_Q else "coupled", given.vocab, support)


SOURCES = {
    source.name: source
    for source in (
        Source("none", "no drafts: plain decoding", _silent),
        Source("ngram", "what followed these tokens earlier in prompt and output", _ngram),
        Source("model", "a small model with the target's vocabulary", _model),
    )
}


def source(name: str) -> Source:
    """The source called `name`. Raises UserError with the choices."""
    if name in SOURCES:
        return SOURCES[name]
    near = get_close_matches(name, SOURCES, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise UserError(f"no draft source is called {name!r}{hint}; there are {', '.join(SOURCES)}")
