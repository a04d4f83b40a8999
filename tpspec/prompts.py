"""Files of prompts: JSON lines with `prompt` and, where it matters, `kind` (chat or completion) and `category`.

For the front doors that answer a file. Must not know the engine, nor what is done with an answer.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tpspec.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

    from tpspec.text import Text

NO_CATEGORY = "all"


@dataclass(frozen=True, slots=True)
class Prompt:
    """chat: goes through the model's chat template. where: it was read, `FILE:LINE`."""

    text: str
    chat: bool = False
    category: str = NO_CATEGORY
    where: str = field(default="", compare=False)

    def encode(self, text: Text) -> tuple[int, ...]:
        """Raises UserError for what is no text, or an empty one, for a model that puts no token before a text."""
        try:
            self.text.encode()
        except UnicodeEncodeError:  # half a character, as which bytes of a command line come that are no text
            raise UserError(f"{self.where or 'the prompt'}: holds bytes that are no text; should be UTF-8") from None
        if self.chat:
            return text.encode_chat([{"role": "user", "content": self.text}])
        if not (ids := text.encode(self.text)):
            raise UserError(
                f"{self.where or repr(self.text)}: the prompt is empty for this model; should hold some text"
            )
        return ids


def read_prompts(path: Path, num_readers: int = 1) -> list[Prompt]:
    """One or more; blank lines are passed over. Raises UserError with the number of a line that is wrong.

    num_readers: processes that read it, each from its beginning.
    """
    if num_readers > 1 and path.is_fifo():
        raise UserError(f"{path}: is a pipe, which {num_readers} ranks cannot all read; should be a file")
    try:
        # Not splitlines: JSON may hold the line separators of Unicode as they are.
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # some editors begin a file with a mark
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    prompts = [_read_line(line, f"{path}:{number}") for number, line in enumerate(lines, start=1) if line.strip()]
    if not prompts:
        raise UserError(f'{path}: has no prompts; should hold lines such as {{"prompt": "Once"}}')
    return prompts


def room_for_answer(prompt: tuple[int, ...], wanted: int, capacity: int, where: str = "") -> int:
    """How many tokens the answer may have: `wanted`, or what is left of `capacity`. UserError when that is none.

    where: as of a Prompt.
    """
    room = capacity - len(prompt)
    if room < 1:
        named = f"{where}: the prompt" if where else "the prompt"
        raise UserError(
            f"{named} has {len(prompt)} tokens; {capacity} can be served, prompt and output together "
            "(the lesser of cache.tokens and the model's max_position_embeddings)"
        )
    return min(wanted, room)


def _read_line(line: str, where: str) -> Prompt:
    value = _read_object(line, where)
    if not isinstance(value.get("prompt"), str):
        raise UserError(f'{where}: should be an object with "prompt": a string')
    kind, category = value.get("kind", "completion"), value.get("category", NO_CATEGORY)
    if kind not in ("chat", "completion"):
        raise UserError(f"{where}: kind is {kind!r}; should be chat or completion")
    if not isinstance(category, str):
        raise UserError(f"{where}: category is {category!r}; should be a string")
    return Prompt(value["prompt"], kind == "chat", category, where)


def _read_object(line: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:  # it counts lines of its own, and would say line 1
        raise UserError(f"{where}: not JSON at column {error.colno}: {error.msg}") from error
    except (ValueError, RecursionError) as error:  # a number too long, an object too deep
        raise UserError(f"{where}: not JSON that can be read: {error}") from error
    return value if isinstance(value, dict) else {}
