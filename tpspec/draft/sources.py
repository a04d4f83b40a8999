"""The registry: how every draft source is made, by name. topology/sources.py has the same names and where they may run.

To add a source: its file, one entry here and one there. Nobody outside this room asks what a source is called.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from inspect import Parameter, signature
from typing import TYPE_CHECKING

from tpspec.cache.pages import Borrowed
from tpspec.draft.assistant import AssistantRun
from tpspec.draft.assistant_checkpoint import load_assistant
from tpspec.draft.eagle import EagleRun
from tpspec.draft.eagle_checkpoint import load_head
from tpspec.draft.lookahead import Lookahead
from tpspec.draft.medusa import Medusa, MedusaHeads
from tpspec.draft.medusa_files import read_heads
from tpspec.draft.model import ModelDrafter
from tpspec.draft.mtp import load_mtp
from tpspec.draft.ngram import Ngram
from tpspec.draft.pard import pard
from tpspec.draft.protocol import Modelled, Needs
from tpspec.draft.run import load_run
from tpspec.draft.suffix import Suffix
from tpspec.draft.thin import ThinRun
from tpspec.errors import UserError
from tpspec.published.head_files import is_assistant
from tpspec.published.shape import ModelShape
from tpspec.tokens import NO_DRAFT, TokenTree
from tpspec.topology.sources import SOURCES as KINDS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from tpspec.draft.eagle import Head
    from tpspec.draft.model import Drawing
    from tpspec.draft.protocol import Ask, Drafter, Given, Taps
    from tpspec.tokens import Verdict
    from tpspec.topology.sources import Options, Value
    from tpspec.verify.rows import RowLogits

NEEDS_Q = "rejection"  # the one rule that must be told what a draft was drawn from


class Silent:
    """Never proposes anything: plain decoding."""

    needs = Needs(is_silent=True)

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
    def options(self) -> dict[str, Value]:
        """The options of this source and their defaults."""
        keywords = signature(self.maker).parameters.values()
        return {option.name: option.default for option in keywords if option.kind is Parameter.KEYWORD_ONLY}

    def make(self, given: Given, **options: Value) -> Drafter | Modelled:
        """What options are called and may be is a rule of topologies."""
        return self.maker(given, **options)


def _silent(given: Given) -> Drafter:
    return Silent()


def _ngram(given: Given, *, min_match: int = 1, floor: int = 10) -> Drafter:
    return Ngram(min_match=min_match, floor=floor)


def _model(given: Given, *, support: int = 64) -> Modelled:
    return Modelled(coupled_or_sampled(given, support), load_run(given))


def _eagle(given: Given, *, support: int = 64) -> Modelled:
    assert given.folder is not None, "the rules of a topology ask for it"
    if not is_assistant(given.folder):
        return _with_head(given, load_head(given), support)
    assistant = load_assistant(given)
    run = AssistantRun(assistant, given.vocab)
    run.prepare()
    return Modelled(coupled_or_sampled(given, support, taps=assistant.taps), run)


def _mtp(given: Given, *, support: int = 64) -> Modelled:
    return _with_head(given, load_mtp(given), support)


def _with_head(given: Given, head: Head, support: int) -> Modelled:
    run = EagleRun(head, given.vocab, given.num_slots, given.num_positions)
    run.prepare()
    return Modelled(coupled_or_sampled(given, support, taps=head.taps, ids=head.ids), run)


def _medusa(given: Given) -> Drafter:
    assert given.folder is not None, "the rules of a topology ask for it"
    heads = MedusaHeads(read_heads(given.folder, given.target), given.dtype, given.device)
    shape = None if given.shape is None else given.shape(heads.num_heads)
    coupled = given.accept != NEEDS_Q
    return Medusa(heads, given.vocab, given.noise, coupled=coupled, branches=given.branches, shape=shape)


def _pard(given: Given, *, places: int = 12, support: int = 64) -> Drafter:
    return pard(given, places, support, gives_q=given.accept == NEEDS_Q)


def _lookahead(given: Given, *, window: int = 7, level: int = 5, guesses: int = 7) -> Drafter:
    return Lookahead(window=window, level=level, guesses=guesses)


def _suffix(given: Given, *, max_depth: int = 16, min_odds: int = 10, kept_tokens: int = 32_768) -> Drafter:
    coupled = given.accept != NEEDS_Q
    return Suffix(given.branches, max_depth=max_depth, min_odds=min_odds, kept_tokens=kept_tokens, coupled=coupled)


def _layer_skip(given: Given, *, skip: str = "", support: int = 64) -> Modelled:
    return _thin(given, "layer_skip", {"skip": skip}, support)


def _early_exit(given: Given, *, layer: int = 0, support: int = 64) -> Modelled:
    return _thin(given, "early_exit", {"layer": layer}, support)


def _thin(given: Given, name: str, options: Options, support: int) -> Modelled:
    shape = ModelShape.of(given.target)
    without = KINDS[name].left_out(options, given.target, shape)
    assert without is not None, "it drafts with the target"
    assert given.thinned is not None, "the rules of a topology keep it beside the shards"
    assert given.pool is not None, "the rules of a topology keep it beside the shards"
    target = given.thinned(without)
    drawing = coupled_or_sampled(given, support, rows=target.rows)
    return Modelled(drawing, ThinRun(target.decoder, given.vocab, shape.max_positions), Borrowed(given.pool))


def coupled_or_sampled(
    given: Given,
    support: int = 64,
    *,
    taps: tuple[int, ...] = (),
    ids: Tensor | None = None,
    rows: Callable[[Tensor], RowLogits] | None = None,
) -> ModelDrafter:
    """What makes drafts of logits, as the rule wants them drawn."""
    drawing: Drawing = "sampled" if given.accept == NEEDS_Q else "coupled"
    return ModelDrafter(given.noise, drawing, given.vocab, support, taps=taps, ids=ids, rows=rows)


SOURCES = {
    source.name: source
    for source in (
        Source("none", "no drafts: plain decoding", _silent),
        Source("ngram", "what followed these tokens earlier in prompt and output", _ngram),
        Source("model", "a small model with the target's vocabulary", _model),
        Source("layer_skip", "the target without the sublayers that a file names", _layer_skip),
        Source("early_exit", "the target's first layers", _early_exit),
        Source("eagle", "a head that goes on from the target's own layers, one token after another", _eagle),
        Source("mtp", "the layer for multi-token prediction in the target's own checkpoint", _mtp),
        Source("medusa", "heads on the target's last layer, each for a place of its own", _medusa),
        Source("pard", "a small model that says several tokens at once", _pard),
        Source("lookahead", "n-grams that the target makes in spare rows of its own rounds", _lookahead),
        Source("suffix", "what followed wherever these tokens stood, in this text and in earlier answers", _suffix),
    )
}


def source(name: str) -> Source:
    """The source called `name`. Raises UserError with the choices."""
    if name in SOURCES:
        return SOURCES[name]
    near = get_close_matches(name, SOURCES, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise UserError(f"no draft source is called {name!r}{hint}; there are {', '.join(SOURCES)}")
