"""Arguments of functions: as JSON, and as text of which a schema says what it stands for.

Must not know how calls are written, HTTP or bodies of requests.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

WORDS = {"True": True, "False": False, "None": None}  # as chat templates show a model its earlier arguments
KINDS: dict[type, str] = {
    str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", list: "array", dict: "object",
}  # fmt: skip
MAX_REFS = 32  # that are followed from one schema
ANY = frozenset(KINDS.values())


def as_json(value: dict[str, Any]) -> str:
    """Raises ValueError for what JSON or UTF-8 cannot say: numbers that are not finite, halves of a surrogate pair."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    text.encode()
    return text


def kind_of(value: object) -> str:
    """The type that JSON Schema has for it."""
    return KINDS[type(value)]


def property_of(schema: Mapping[str, Any], name: str) -> Any:
    """The schema of a property of an object; {} where it says nothing of it."""
    properties = schema.get("properties")
    return properties.get(name, {}) if isinstance(properties, dict) else {}


def kinds_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """The types a schema allows, as far as it names them. root: in which its references are looked up."""
    return _kinds(schema, root, set())


def _kinds(schema: Any, root: Mapping[str, Any], seen: set[str]) -> frozenset[str]:
    """seen: references that have been followed, and are not again: a schema may hold itself, more than once."""
    if not isinstance(schema, dict):
        return ANY
    if (values := listed_values(schema)) is not None:
        return frozenset(map(kind_of, values))
    if isinstance(ref := schema.get("$ref"), str):
        if ref in seen or len(seen) >= MAX_REFS:
            return frozenset() if ref in seen else ANY
        seen.add(ref)
        return _kinds(referred(ref, root), root, seen)
    named = schema.get("type")
    if isinstance(named, str | list):
        return frozenset([named] if isinstance(named, str) else filter(_is_name, named))
    for key in ("anyOf", "oneOf"):
        if isinstance(branches := schema.get(key), list):
            return frozenset[str]().union(*(_kinds(branch, root, seen) for branch in branches))
    parts = schema.get("allOf")
    inner = (_kinds(part, root, seen) for part in (parts if isinstance(parts, list) else ()))
    return ANY.intersection(*inner)


def listed_values(schema: Mapping[str, Any]) -> list[Any] | None:
    """Those that are allowed, where a schema lists them."""
    if isinstance(values := schema.get("enum"), list):
        return values
    return [schema["const"]] if "const" in schema else None


def referred(ref: str, root: Mapping[str, Any]) -> Any:
    """What a reference within a schema refers to; None where that is nothing, or lies elsewhere."""
    value: Any = root if ref.startswith("#") else None
    for part in ref.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        value = value.get(key) if isinstance(value, dict) else None
    return value


def read_value(text: str, schema: Mapping[str, Any], name: str) -> Any:
    """What a text stands for as the argument `name` of a function whose arguments have this schema.

    Itself where that is a string; else a value of a type that the schema allows; and itself again where it is none:
    whoever called can say so to the model, who would not hear of a call that got lost.
    """
    kinds = kinds_of(property_of(schema, name), schema)
    if kinds == {"string"}:
        return text
    try:
        value = WORDS[text.strip()] if text.strip() in WORDS else json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if _names(value) & (kinds - {"string"}) else text


def _names(value: object) -> set[str]:
    kind = kind_of(value)
    is_whole = isinstance(value, float) and value.is_integer()
    return {kind, *(["number"] if kind == "integer" else []), *(["integer"] if is_whole else [])}


def _is_name(value: object) -> bool:
    return isinstance(value, str)
