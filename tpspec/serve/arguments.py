"""Arguments of functions: as JSON, and as text of which a schema says what it stands for.

Must not know how calls are written, HTTP or bodies of requests.
"""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from tpspec.grammar import without_annotations

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

MAX_DEPTH = 32  # of a schema, or of the arguments of a call
WORDS = {"True": True, "False": False, "None": None}  # as chat templates show a model its earlier arguments
BLANKS = " \t\r\n"  # JSON's own
KINDS: dict[type, str] = {
    str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", list: "array", dict: "object",
}  # fmt: skip
ANY_KIND = frozenset(KINDS.values())
MAX_LEVELS = 32  # of one schema, through its references: definitions may hold themselves
MAX_STEPS = 1 << 15  # schemas and listed values of one function that are looked at: and hold themselves twice
SAYS_NOTHING = frozenset(("format",))  # to us; annotations are taken out before
BESIDE_REFS = SAYS_NOTHING | {"$ref", "$defs", "definitions", "$schema", "$id"}
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


def key_of(value: Any) -> Hashable:
    """The same for what JSON Schema holds to be the same: 1 is 1.0, and neither is true. Of a string, itself."""
    if isinstance(value, dict):
        return "object", frozenset((name, key_of(one)) for name, one in value.items())
    if isinstance(value, list):
        return "array", tuple(map(key_of, value))
    return ("boolean", value) if isinstance(value, bool) else value


def kinds_of(value: object) -> frozenset[str]:
    """The types that JSON Schema has for a value: a whole number is of two."""
    kind = KINDS[type(value)]
    is_whole = kind == "integer" or (isinstance(value, float) and value.is_integer())
    return frozenset(("integer", "number") if is_whole else (kind,))


@dataclass(frozen=True, slots=True)
class Offer:
    """What a schema allows, as far as its types and lists say: these values, by key, and all values of these types."""

    values: Mapping[Hashable, Any] = field(default_factory=dict)
    kinds: frozenset[str] = ANY_KIND

    def allows(self, value: object) -> bool:
        return self.has_kind(value) or key_of(value) in self.values

    def has_kind(self, value: object) -> bool:
        return bool(kinds_of(value) & self.kinds)

    @property
    def all_kinds(self) -> frozenset[str]:
        """With those of its values."""
        return self.kinds.union(*map(kinds_of, self.values.values()))

    def __or__(self, other: Offer) -> Offer:
        return _any_of([self, other])

    def __and__(self, other: Offer) -> Offer:
        values = {key: one for key, one in self.values.items() if key in other.values or other.has_kind(one)}
        values |= {key: one for key, one in other.values.items() if self.has_kind(one)}
        return Offer(values, _closed(self.kinds) & _closed(other.kinds))


def _closed(kinds: frozenset[str]) -> frozenset[str]:
    """Numbers are whole ones, too."""
    return kinds | {"integer"} if "number" in kinds else kinds


ANYTHING, NOTHING = Offer(), Offer(kinds=frozenset())


class Arguments:
    """Of one function. schema: of the object that they are. root: without its annotations."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self.root = without_annotations(schema)
        self._offers: dict[str | None, Offer] = {}
        self._owns: dict[int, tuple[dict[str, Any], Offer]] = {}  # by id of a schema, which is kept with it
        self._targets: dict[str, Any] = {}  # of references
        self._num_steps = 0

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

    def is_json(self, name: str) -> bool:
        """Whether the argument `name` is a list or an object, or something else that is no string."""
        kinds = self._known_offer(name).all_kinds
        return "string" not in kinds and bool(kinds & {"array", "object"})

    def schema_of(self, name: str) -> Any:
        """Of an argument; {} where nothing is said of it."""
        if name in self.properties:
            return self.properties[name]
        others = self.object.get("additionalProperties")
        return others if isinstance(others, dict) else {}

    @cached_property
    def properties(self) -> dict[str, Any]:
        found = self.object.get("properties")
        return found if isinstance(found, dict) else {}

    @cached_property
    def object(self) -> Mapping[str, Any]:
        """The schema, or what it refers to where it does only that."""
        schema: Any = self.root
        for _ in range(MAX_LEVELS):
            if set(schema) - BESIDE_REFS or not isinstance(ref := schema.get("$ref"), str):
                return schema  # type: ignore[no-any-return]
            target = self.referred(ref)
            schema = target if isinstance(target, dict) else {}
        return {}

    def offer_of(self, schema: Any) -> Offer:
        """What a schema within that of the function allows."""
        return self._offer(schema, [])

    def referred(self, ref: str) -> Any:
        """What a reference within the schema refers to; None where that is nothing, or lies elsewhere."""
        if ref not in self._targets:
            self._targets[ref] = _referred(ref, self.root)
        return self._targets[ref]

    def _known_offer(self, name: str) -> Offer:
        key = name if name in self.properties else None
        if key not in self._offers:
            self._offers[key] = self.offer_of(self.schema_of(name))
        return self._offers[key]

    def _offer(self, schema: Any, trail: list[str]) -> Offer:
        """trail: how it was come by. Where that is too long, or too much was looked at, its own types and lists count.

        What refers to itself offers nothing by that.
        """
        if not isinstance(schema, dict):
            return NOTHING if schema is False else ANYTHING
        own = self._own(schema)
        self._num_steps += 1 + len(own.values)
        if len(trail) >= MAX_LEVELS or self._num_steps > MAX_STEPS:
            return own
        parts = list[Offer]()
        if isinstance(ref := schema.get("$ref"), str):
            parts.append(NOTHING if ref in trail else self._offer(self.referred(ref), [*trail, ref]))
        for key in ("anyOf", "oneOf", "allOf"):
            if isinstance(branches := schema.get(key), list):
                offers = [self._offer(branch, [*trail, key]) for branch in branches]
                parts += offers if key == "allOf" else [_any_of(offers)]
        for part in sorted(parts, key=lambda part: len(part.values)):
            self._num_steps += len(own.values)
            if self._num_steps <= MAX_STEPS:
                own &= part
        return own

    def _own(self, schema: dict[str, Any]) -> Offer:
        """By its types and lists alone, which are read once, however often it is referred to."""
        if id(schema) not in self._owns:
            values, kinds = _listed(schema), named_types(schema)
            offer = ANYTHING if values is None else Offer({key_of(value): value for value in values}, frozenset())
            self._owns[id(schema)] = schema, offer if kinds is None else offer & Offer(kinds=kinds)
        return self._owns[id(schema)][1]


def _any_of(offers: list[Offer]) -> Offer:
    values = {key: value for offer in offers for key, value in offer.values.items()}
    return Offer(values, frozenset[str]().union(*(offer.kinds for offer in offers)))


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


def named_types(schema: Mapping[str, Any]) -> frozenset[str] | None:
    """None where it names none."""
    named = schema.get("type")
    if isinstance(named, list):
        return frozenset(one for one in named if isinstance(one, str))
    return frozenset((named,)) if isinstance(named, str) else None


def listed_values(schema: Mapping[str, Any]) -> list[Any] | None:
    """Those that are allowed, where a schema lists them: of the types that it names."""
    values, kinds = _listed(schema), named_types(schema)
    return values if values is None or kinds is None else list(filter(Offer(kinds=kinds).has_kind, values))


def _listed(schema: Mapping[str, Any]) -> list[Any] | None:
    values = schema.get("enum")
    if "const" not in schema:
        return values if isinstance(values, list) else None
    only = schema["const"]
    return [only] if not isinstance(values, list) or key_of(only) in map(key_of, values) else []


def _referred(ref: str, root: Mapping[str, Any]) -> Any:
    value: Any = root if f"{ref}/".startswith("#/") else None
    for part in ref.split("/")[1:]:
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(value, list) and key.isdecimal() and len(key) < 6:
            value = value[int(key)] if int(key) < len(value) else None
        else:
            value = value.get(key) if isinstance(value, dict) else None
    return value
