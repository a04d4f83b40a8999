"""The registry: how every draft source is made, by name. topology/sources.py has the same names and where they may run.

To add a source: its file, one entry here and one there. Nobody outside this room asks what a source is called.
"""

from __future__ import annotations

from functools import partial
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


def _silent(given: Given) -> Drafter:
    return Silent()


def _ngram(given: Given, *, min_match: int, floor: int) -> Drafter:
    return Ngram(min_match=min_match, floor=floor)


def _model(given: Given, *, support: int) -> Modelled:
    return Modelled(coupled_or_sampled(given, support), load_run(given))


def _eagle(given: Given, *, support: int) -> Modelled:
    assert given.folder is not None, "the rules of a topology ask for it"
    if not is_assistant(given.folder):
        return _with_head(given, load_head(given), support)
    assistant = load_assistant(given)
    run = AssistantRun(assistant, given.vocab)
    run.prepare()
    return Modelled(coupled_or_sampled(given, support, taps=assistant.taps), run)


def _mtp(given: Given, *, support: int) -> Modelled:
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


def _pard(given: Given, *, places: int, support: int) -> Drafter:
    return pard(given, places, support, gives_q=given.accept == NEEDS_Q)


def _lookahead(given: Given, *, window: int, level: int, guesses: int) -> Drafter:
    return Lookahead(window=window, level=level, guesses=guesses)


def _suffix(given: Given, *, max_depth: int, min_odds: int, kept_tokens: int) -> Drafter:
    coupled = given.accept != NEEDS_Q
    return Suffix(given.branches, max_depth=max_depth, min_odds=min_odds, kept_tokens=kept_tokens, coupled=coupled)


def _thin(name: str, given: Given, *, support: int, **options: Value) -> Modelled:
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


# What makes each: of what the house gives every source, and of its own options, as keywords.
SOURCES: dict[str, Callable[..., Drafter | Modelled]] = {
    "none": _silent,  # plain decoding
    "ngram": _ngram,  # what followed these tokens earlier in prompt and output
    "model": _model,  # a small model with the target's vocabulary
    "layer_skip": partial(_thin, "layer_skip"),  # the target without the sublayers that a file names
    "early_exit": partial(_thin, "early_exit"),  # the target's first layers
    "eagle": _eagle,  # a head that goes on from the target's own layers, one token after another
    "mtp": _mtp,  # the layer for multi-token prediction in the target's own checkpoint
    "medusa": _medusa,  # heads on the target's last layer, each for a place of its own
    "pard": _pard,  # a small model that says several tokens at once
    "lookahead": _lookahead,  # n-grams that the target makes in spare rows of its own rounds
    "suffix": _suffix,  # what followed wherever these tokens stood, in this text and in earlier answers
}


def make(name: str, given: Given, options: Options) -> Drafter | Modelled:
    """The source of that name. options: of any; those that are its own count, and are what a topology's rules allow."""
    own = {key: options.get(key, option.usual) for key, option in KINDS[name].options.items()}
    return SOURCES[name](given, **own)
