"""Where the prompts of a training run come from: a file, or the model itself, which is asked to write the user's turn.

An instruct model that reads its chat template up to the user's turn goes on with a turn of its own (Magpie, Xu et al.,
arXiv 2406.08464); a short opening steers what it is about. Knows text; must not know engines or files of texts.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Protocol

import yaml

from tpspec.errors import UserError
from tpspec.request import Sampling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tpspec.prompts import Prompt
    from tpspec.text import Text

MARK = "\ue000"  # stands for the user's turn while the template around it is found
INVENTING = Sampling(temperature=0.8, top_p=0.95)  # at 1 a small model loses the thread of its own question
WARM_EVERY, WARM = 5, 0.7  # one answer in so many is drawn at this temperature, the others are greedy


@dataclass(frozen=True, slots=True)
class Start:
    """How a text begins: ids to read, and how many the model may add to them before its answer (0: none).

    turn: what of the user's turn is in the ids; None where there are no turns.
    """

    kind: str
    ids: tuple[int, ...]
    invents: int = 0
    turn: str | None = None


class Prompts(Protocol):
    """Text `number` of a run; the same for the same number."""

    def start(self, number: int) -> Start: ...
    def finished(self, start: Start, invented: Sequence[int]) -> tuple[int, ...]:
        """The whole prompt, once the model has written its part."""

    def temperature(self, number: int) -> float: ...


class Given:
    """The prompts of a file, over and over: greedy the first time, then drawn."""

    def __init__(self, text: Text, prompts: Sequence[Prompt]) -> None:
        self._starts = [Start(prompt.category, prompt.encode(text)) for prompt in prompts]

    def start(self, number: int) -> Start:
        return self._starts[number % len(self._starts)]

    def finished(self, start: Start, invented: Sequence[int]) -> tuple[int, ...]:
        return start.ids

    def temperature(self, number: int) -> float:
        return 0.0 if number < len(self._starts) else WARM


@dataclass(frozen=True, slots=True)
class Theme:
    """Openings of one kind. share: of all texts, relative to the other themes'."""

    kind: str
    share: int
    tokens: int
    openings: list[str]
    chat: bool = True


class Invented:
    """Openings that the model goes on from. A model without a chat template only gets text to continue."""

    def __init__(self, text: Text, seed: int) -> None:
        self._text, self._seed = text, seed
        self._themes = [theme for theme in themes() if text.has_chat_template or not theme.chat]
        self._before, self._after = _around(text) if text.has_chat_template else ("", "")

    def start(self, number: int) -> Start:
        chance = random.Random(f"{self._seed} {number}")
        (theme,) = chance.choices(self._themes, [theme.share for theme in self._themes])
        opening = chance.choice(theme.openings)
        if not theme.chat:
            return Start(theme.kind, self._text.encode(opening), theme.tokens)
        return Start(theme.kind, self._text.encode_rendered(self._before + opening), theme.tokens, opening)

    def finished(self, start: Start, invented: Sequence[int]) -> tuple[int, ...]:
        written = [token for token in invented if token not in self._text.eos_ids]
        if start.turn is None:
            return (*start.ids, *written)
        # Through text and back, so that the ids are those of a user who typed it.
        turn = start.turn + self._text.decode(written, skip_special=False)
        return self._text.encode_rendered(self._before + turn.strip() + self._after)

    def temperature(self, number: int) -> float:
        return WARM if number % WARM_EVERY == 0 else 0.0


def themes() -> list[Theme]:
    source = resources.files(__package__).joinpath("openings.yaml").read_text(encoding="utf-8")
    return [Theme(**theme) for theme in yaml.safe_load(source)]


def _around(text: Text) -> tuple[str, str]:
    """What the chat template writes before and after a user's turn."""
    rendered = text.render_chat([{"role": "user", "content": MARK}], answer=True)
    before, found, after = rendered.partition(MARK)
    if not found:
        raise UserError("the chat template does not show the user's turn; give a file of prompts with --prompts")
    return before, after
