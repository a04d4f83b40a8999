"""JSON schemas: what is allowed, as far as types and lists say, through references and whatever holds itself.

Must not know functions, how calls are written, HTTP or bodies of requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from tpspec.grammar import without_annotations

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

KINDS: dict[type, str] = {
    str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", list: "array", dict: "object",
}  # fmt: skip
ANY_KIND = frozenset(KINDS.values())
MAX_LEVELS = 32  # of one schema, through its references: definitions may hold themselves
MAX_STEPS = 1 << 15  # schemas and listed values of one function that are looked at: and hold themselves twice
# All that bind; anything else is a note of somebody's, and `format` is to us.
KEYWORDS = frozenset((
    "type", "enum", "const", "$ref", "$dynamicRef", "$recursiveRef", "anyOf", "oneOf", "allOf", "not", "if", "then",
    "else", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength",
    "pattern", "items", "prefixItems", "additionalItems", "unevaluatedItems", "contains", "minContains", "maxContains",
    "minItems", "maxItems", "uniqueItems", "properties", "patternProperties", "additionalProperties", "propertyNames",
    "unevaluatedProperties", "minProperties", "maxProperties", "required", "dependentRequired", "dependentSchemas",
    "dependencies",
))  # fmt: skip


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

    def __and__(self, other: Offer) -> Offer:
        values = {key: one for key, one in self.values.items() if key in other.values or other.has_kind(one)}
        values |= {key: one for key, one in other.values.items() if self.has_kind(one)}
        return Offer(values, closed(self.kinds) & closed(other.kinds))


def closed(kinds: frozenset[str]) -> frozenset[str]:
    """Numbers are whole ones, too."""
    return kinds | {"integer"} if "number" in kinds else kinds


ANYTHING, NOTHING = Offer(), Offer(kinds=frozenset())


class Schema:
    """Of an object with properties, and what it refers to within itself. root: without its annotations."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self.root = without_annotations(schema)
        self._owns: dict[int, tuple[dict[str, Any], Offer]] = {}  # by id of a schema, which is kept with it
        self._targets: dict[str, Any] = {}  # of references
        self._num_steps = 0

    def schema_of(self, name: str | None) -> Any:
        """Of an argument, None for all that have no name here; {} where nothing is said of it."""
        if name is not None and name in self.properties:
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
            if set(schema) & KEYWORDS != {"$ref"} or not isinstance(ref := schema["$ref"], str):
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
                parts += offers if key == "allOf" else [any_of(offers)]
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


def any_of(offers: list[Offer]) -> Offer:
    values = {key: value for offer in offers for key, value in offer.values.items()}
    return Offer(values, frozenset[str]().union(*(offer.kinds for offer in offers)))


def named_types(schema: Mapping[str, Any]) -> frozenset[str] | None:
    """None where it names none."""
    named = schema.get("type")
    if isinstance(named, list):
        return frozenset(one for one in named if isinstance(one, str))
    return frozenset((named,)) if isinstance(named, str) else None


def is_of_objects(schema: Mapping[str, Any]) -> bool:
    """By the types that it names, among which there may be others."""
    return "type" not in schema or "object" in (named_types(schema) or ())


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
