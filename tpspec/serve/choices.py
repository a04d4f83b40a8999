"""What a schema lets one choose from, where a string is written as it is and anything else as JSON.

Must not know grammars, how calls are written, HTTP or bodies of requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tpspec.grammar import rewritten
from tpspec.serve.schemas import KEYWORDS, Offer, any_of, closed, listed_values, named_types

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping, Set

    from tpspec.serve.schemas import Schema

PLAIN, OF_LISTS = {"type"}, {"type", "enum", "const"}
# Beside texts: they say nothing of strings.
OF_TEXTS = PLAIN | {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
OF_TEXTS |= {"items", "prefixItems", "minItems", "maxItems", "properties", "required", "additionalProperties"}
BRANCHES = ("anyOf", "oneOf", "allOf")
BLANKS = " \t\r\n"  # JSON's own
WORDS = {"True": True, "False": False, "None": None}  # as chat templates show a model its earlier arguments
LETTERS = {"array": "[", "object": "{"}  # with which JSON begins
BEGINNINGS = {"integer": r"\-0-9", "number": r"\-0-9", "array": r"\[", "object": "{"}  # as in brackets of a pattern
MAX_LEAVES = 256  # of a value's schema
MAX_DEFINITIONS = 256  # that a value's schema refers to
MAX_SHOWN, SHOWN_CHARS = 8, 80  # of names in what is told of them


class Choices:
    """What a schema lets one choose from: values that it lists, texts, and JSON of `others`, which are schemas.

    words: values as Python writes them. no_beginnings: letters with which a text may not begin, or it would be read as
    JSON that `others` do not allow. Raises ValueError for a schema that cannot be told apart so.
    is_lenient: what else a schema says of texts counts for nothing, and is no reason to raise.
    """

    def __init__(self, schema: Any, within: Schema, *, is_lenient: bool) -> None:
        self._is_lenient = is_lenient
        self.listed: list[Any] = []
        self.others: list[dict[str, Any]] = []
        self.has_texts = False
        self._free, self._bound = frozenset[str](), frozenset[str]()
        offers = list[Offer]()
        for leaf in leaves(schema, within):
            offer = within.offer_of(leaf)
            offers.append(offer)
            self._add(leaf, offer)
        if not self.listed and not self.others and not self.has_texts:
            raise ValueError("its schema allows nothing")
        allowed = any_of(offers)
        self.words = [word for word, value in WORDS.items() if allowed.allows(value)]
        self.no_beginnings = self._no_beginnings() if self.has_texts else ""
        if self.has_texts:  # which hold the rest of it
            self.others = [leaf for leaf in self.others if not set(leaf) <= PLAIN or self._is_kept_from_texts(leaf)]

    def _add(self, leaf: dict[str, Any], offer: Offer) -> None:
        values, kinds = listed_values(leaf), offer.all_kinds
        if values is not None and (set(leaf) <= OF_LISTS or "string" in kinds):
            self._check(leaf, OF_LISTS)
            self.listed += values
            return
        if "string" in kinds:
            self._check(leaf, OF_TEXTS)
            self.has_texts = True
            kinds -= {"string"}
            leaf = {**leaf, "type": sorted(kinds)}
        if not kinds:
            return
        self.others.append(leaf)
        if set(leaf) <= PLAIN:
            self._free |= kinds
        else:
            self._bound |= kinds

    def _check(self, leaf: dict[str, Any], known: Set[str]) -> None:
        if not self._is_lenient:
            check_keys(leaf, known)

    def _no_beginnings(self) -> str:
        kinds = self._bound - self._free
        if others := sorted(kinds - set(BEGINNINGS)):
            raise ValueError(f"{' and '.join(others)} beside texts, bound by more than a type or a list")
        return "".join(sorted({BEGINNINGS[kind] for kind in kinds}))

    def _is_kept_from_texts(self, leaf: dict[str, Any]) -> bool:
        return any(BEGINNINGS.get(kind, "x") in self.no_beginnings for kind in named_types(leaf) or ())


def leaves(schema: Any, within: Schema) -> Iterator[dict[str, Any]]:
    """What a schema offers to choose from, without those that it refers to twice. Raises ValueError for too many."""
    for number, leaf in enumerate(_leaves(schema, within)):
        if number >= MAX_LEAVES:
            raise ValueError(f"more than {MAX_LEAVES} schemas to choose from")
        yield leaf


def _leaves(schema: Any, within: Schema) -> Iterator[dict[str, Any]]:
    rest, seen = [schema], set[str]()
    while rest:
        one = rest.pop()
        if not isinstance(one, dict):
            if one is not False:
                yield {}
            continue
        one = {key: one[key] for key in one if key in KEYWORDS}
        key = next(iter(one)) if len(one) == 1 else ""
        inner = one.get(key)
        if key == "$ref" and isinstance(inner, str):
            if inner not in seen:
                seen.add(inner)
                rest.append(_target(inner, within))
        elif key in BRANCHES and isinstance(inner, list) and inner and _is_union(key, inner, within):
            rest += reversed(inner)
        else:
            yield one


def _is_union(key: str, branches: list[Any], within: Schema) -> bool:
    """Whether what they allow together is what any of them allows."""
    if key != "oneOf":
        return key == "anyOf" or len(branches) == 1
    keys: set[Hashable] = set()
    kinds_of_values, kinds = frozenset[str](), frozenset[str]()
    for offer in map(within.offer_of, branches):
        its_kinds, all_kinds = closed(offer.kinds), closed(offer.kinds) | offer.all_kinds
        if not keys.isdisjoint(offer.values) or all_kinds & kinds or its_kinds & kinds_of_values:
            return False
        keys.update(offer.values)
        kinds_of_values |= all_kinds
        kinds |= its_kinds
    return True


def _target(ref: str, within: Schema) -> Any:
    target = within.referred(ref)
    if target is None:
        raise ValueError(f"$ref {shown(ref)} leads to nothing in it")
    return target


def self_contained(schemas: list[dict[str, Any]], within: Schema) -> dict[str, Any]:
    """Any of these, with what they refer to, and no more of the schema they stand in. Raises ValueError."""
    names: dict[str, str] = {}  # of definitions, by reference, in the order in which they are met

    def moved(schema: Mapping[str, Any]) -> dict[str, Any]:
        ref = schema.get("$ref")
        if not isinstance(ref, str):
            return dict(schema)
        return {**schema, "$ref": f"#/$defs/{names.setdefault(ref, f'd{len(names)}')}"}

    whole = {"anyOf": rewritten(schemas, moved)}
    definitions: dict[str, Any] = {}
    while len(definitions) < len(names):
        ref = list(names)[len(definitions)]
        if len(names) > MAX_DEFINITIONS:
            raise ValueError(f"more than {MAX_DEFINITIONS} references")
        definitions[names[ref]] = rewritten(_target(ref, within), moved)
    return {**whole, "$defs": definitions} if definitions else whole


def check_keys(schema: Mapping[str, Any], known: Set[str]) -> None:
    """Raises ValueError with those that bind, and are not known."""
    if others := sorted(set(schema) & KEYWORDS - known):
        raise ValueError(", ".join(map(shown, others[:MAX_SHOWN])))


def shown(name: str) -> str:
    """Of a name that may be long, in what is told of it."""
    return name if len(name) <= SHOWN_CHARS else f"{name[:SHOWN_CHARS]}..."
