"""Arguments of functions: as JSON, and as text of which a schema says what it stands for.

Must not know how calls are written, HTTP or bodies of requests.
"""

from __future__ import annotations

import ast
import json
import warnings
from typing import TYPE_CHECKING, Any

from tpspec.serve.choices import BLANKS, LETTERS, WORDS, Choices
from tpspec.serve.schemas import KINDS, Schema

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tpspec.serve.schemas import Offer

    Functions = Mapping[str, "Arguments"]
    Call = tuple[str, str]  # a function's name, and its arguments as a JSON object

LONGEST_KEY = 256  # characters, of an argument's name
MAX_DEPTH = 32  # of a schema, or of the arguments of a call
MAX_LITERAL = 1 << 16  # characters of a list or an object that Python would read


def as_json(value: dict[str, Any]) -> str:
    """Raises ValueError for what could not be sent back in another request.

    That is what JSON or UTF-8 cannot say, numbers that are not finite or halves of a surrogate pair, or is too deep.
    """
    if is_deep(value):
        raise ValueError(f"more than {MAX_DEPTH} levels")
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    text.encode()
    return text


def is_deep(value: object, levels: int = MAX_DEPTH) -> bool:
    """Whether lists and objects nest deeper than `levels`."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels < 0 or any(is_deep(one, levels - 1) for one in inner)


class Arguments:
    """Of one function. schema: of the object that they are."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self.schema = Schema(schema)
        self._offers: dict[str | None, Offer] = {}
        self._letters: dict[str | None, str] = {}

    def value(self, name: str, text: str) -> Any:
        """What a text stands for as the argument `name`.

        Itself where that is a string; else a value that the schema allows, as far as types and lists say; and itself
        again where it is none: whoever called can say so to the model, who would not hear of a call that got lost.
        """
        offer = self._known_offer(name)
        if text in offer.values or (offer.kinds <= {"string"} and not offer.values):
            return text
        try:
            value = read_value(text, offer)
            as_json({name: value})
        except (ValueError, RecursionError, MemoryError):
            return text
        return text if isinstance(value, str) or not offer.allows(value) else value

    def allows(self, name: str, value: Any) -> bool:
        """Whether the schema allows that value as the argument `name`, as far as types and lists say."""
        return self._known_offer(name).allows(value)

    def json_letters(self, name: str | None) -> str:
        """With which the argument `name` is a list or an object: it is no text that begins so, after blanks.

        None: for all that the schema does not name.
        """
        key = self._key(name)
        if key not in self._letters:
            self._letters[key] = self._found_letters(name)
        return self._letters[key]

    def _found_letters(self, name: str | None) -> str:
        offer = self._known_offer(name)
        if "string" not in offer.kinds:
            return "".join(letter for kind, letter in LETTERS.items() if kind in offer.all_kinds)
        try:
            choices = Choices(self.schema.schema_of(name), self.schema, is_lenient=True)
        except ValueError:
            return ""
        return "".join(letter for letter in LETTERS.values() if letter in choices.no_beginnings)

    def _known_offer(self, name: str | None) -> Offer:
        key = self._key(name)
        if key not in self._offers:
            self._offers[key] = self.schema.offer_of(self.schema.schema_of(name))
        return self._offers[key]

    def _key(self, name: str | None) -> str | None:
        """One for all that the schema does not name."""
        return name if name in self.schema.properties else None


def read_value(text: str, offer: Offer) -> Any:
    """JSON, or what Python would write in its place. Raises ValueError, RecursionError or MemoryError."""
    stripped = text.strip(BLANKS)
    if stripped in WORDS:
        return WORDS[stripped]
    try:
        return json.loads(stripped)
    except ValueError:
        if stripped[:1] in ("[", "{") and offer.kinds & {"array", "object"} and len(stripped) <= MAX_LITERAL:
            return _python_literal(stripped)
        raise


def _python_literal(text: str) -> Any:
    try:
        with warnings.catch_warnings(action="ignore"):  # of escapes that Python will not read for ever
            value = ast.literal_eval(text)
    except (SyntaxError, TypeError) as error:
        raise ValueError(str(error)) from error
    if not _is_json(value):
        raise ValueError("no JSON")
    return value


def _is_json(value: object) -> bool:
    """By its types: json would write tuples and numbers as keys, too."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(one) for key, one in value.items())
    return all(map(_is_json, value)) if isinstance(value, list) else type(value) in KINDS
