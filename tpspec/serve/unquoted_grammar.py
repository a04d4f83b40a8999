"""The grammar of objects whose keys stand as they are: rules of llguidance's Lark for a function and its schema.

Keys come in the order in which templates show them, that of their letters. Where a function is not strict, what of its
schema cannot bind a call binds none. Must not know HTTP, bodies of requests or what stands around calls.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from tpspec.serve.arguments import LONGEST_KEY
from tpspec.serve.choices import check_keys, leaves, shown
from tpspec.serve.grammars import MAX_CHOICES, arguments_schema, check_size, check_tools
from tpspec.serve.lark import FREE, joined, marked, other_than, quoted, up_to
from tpspec.serve.schemas import ANY_KIND, Schema, is_of_objects, listed_values, named_types
from tpspec.serve.tool_faults import NO_OBJECT, fault_of, unbound
from tpspec.serve.unquoted import NO_KEY, patterns

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from tpspec.serve.call_formats import Unquoted

OF_NUMBERS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
KNOWN = {"type", "items", "minItems", "maxItems", "properties", "required", "additionalProperties"} | OF_NUMBERS
KEY_PATTERN = rf'[^{NO_KEY}\n"<>]{{1,{LONGEST_KEY}}}'
# Rules that all functions share.
ANY, TEXT, LIST, OBJECT, KEY, NUMBER, INTEGER = "any", "text", "list", "object", "KEY", "NUMBER", "INTEGER"
BOOLEAN, NULL = '("true" | "false")', '"null"'
OF_KINDS = {
    "string": TEXT,
    "number": NUMBER,
    "integer": INTEGER,
    "boolean": BOOLEAN,
    "null": NULL,
    "array": LIST,
    "object": OBJECT,
}
DIGITS = "(0|[1-9][0-9]{0,199})"  # and an exponent of two more is a number that is finite


class UnquotedRules:
    """Of the functions that are added, one by one. parts: grammars of the values that `rules` refer to, by name."""

    def __init__(self, form: Unquoted, added: Mapping[str, int]) -> None:
        self._head, self._quote = form.head, form.quote
        self._mark = marked(form.quote, added)
        self.parts: dict[str, str] = {}
        self.names: dict[str, str] = {}  # of rules and parts, by what they are for: functions share them
        self._plain = patterns(form.quote).plain
        self._num_chars = 0
        self.rules = [
            f"{KEY}: {other_than([''], f'/{KEY_PATTERN}/')}",
            f"{INTEGER}: /-?{DIGITS}/",
            rf"{NUMBER}: /-?{DIGITS}(\.[0-9]{{1,200}})?([eE][+-]?[0-9]{{1,2}})?/",
            f"{ANY}: {TEXT} | {NUMBER} | {BOOLEAN} | {NULL} | {LIST} | {OBJECT}",
            f'{LIST}: "[" ({ANY} ("," {ANY})*)? "]"',
            f'{OBJECT}: "{{" (pair ("," pair)*)? "}}"',
            f'pair: {KEY} ":" {ANY}',
            f"{TEXT}: {self._mark} ended",
            *(f"{rule}: {text}" for rule, text in up_to("ended", FREE, form.quote, added).items()),
        ]

    def add(self, rule: str, name: str, schema: Mapping[str, Any], *, is_bound: bool, is_strict: bool) -> None:
        """A rule of a function's calls. Raises ApiError where a strict one's schema cannot bind them."""
        arguments = OBJECT
        if is_bound:
            check_size(schema, "tools")
            whole = Schema(schema)
            if is_of_objects(whole.object) and (whole.object or "$ref" not in whole.root):
                try:
                    arguments = _Values(self, name, whole, is_strict=is_strict).arguments()
                except ValueError as fault:
                    raise unbound(name, fault) from fault
            elif is_strict:
                raise fault_of(name, NO_OBJECT)
        self.rule(rule, f"{quoted(self._head + name)} {arguments}")

    def rule(self, name: str, text: str) -> str:
        """Its name. Raises ApiError where that is too much."""
        self.rules.append(f"{name}: {text}")
        self._num_chars += len(name) + len(text)
        check_tools(self._num_chars)
        return name

    def part(self, schema: Mapping[str, Any], name: str, *, is_strict: bool) -> str:
        """Refers to a grammar of JSON. name: as clients are told of a fault."""
        grammar = arguments_schema(schema, is_strict=is_strict)
        if grammar not in self.names:
            self.names[grammar] = name
            self.parts[name] = grammar
            self._num_chars += len(grammar)
        return f"@{self.names[grammar]}"

    def one_of(self, texts: Sequence[str]) -> str:
        """Between its marks. Raises ValueError."""
        for text in texts:
            if self._quote in text:
                raise ValueError(f"{self._quote} in {shown(text)!r} would end it")
        some = f"({' | '.join(map(json.dumps, texts))})" if texts != [""] else ""
        return joined(self._mark, some, self._mark)

    def key(self, key: str) -> str:
        """With what stands behind it. Raises ValueError."""
        is_plain = self._plain.fullmatch(key) and key.strip() == key and len(key) <= LONGEST_KEY
        return joined(quoted(key) if is_plain else self.one_of([key]), '":"')


class _Way(NamedTuple):
    """Of which a value is one. needs: rules without which there is none of it."""

    text: str
    needs: frozenset[str] = frozenset()


class _Values:
    """Rules for the values of one function, each named once, however often its schema is met, or holds itself."""

    def __init__(self, rules: UnquotedRules, function: str, within: Schema, *, is_strict: bool) -> None:
        self._rules, self._function, self._within, self._is_strict = rules, function, within, is_strict
        self._root = json.dumps(within.root)
        self._rest: list[tuple[str, Any]] = []  # that are named, and say nothing yet
        self._made: dict[str, tuple[Any, list[_Way]]] = {}  # with the schemas that they are of

    def arguments(self) -> str:
        """What stands for them. Raises ValueError, as all here do, for what cannot be bound where that is strict."""
        arguments = self._value({**self._within.object, "type": "object"})
        while self._rest:
            name, schema = self._rest.pop()
            self._made[name] = schema, self._ways(name, schema)
        for name in self._endless():
            if self._is_strict:
                raise ValueError("its schema allows nothing that ends")
            self._made[name] = None, [_anything(self._made[name][0])]
        for name, (_, ways) in self._made.items():
            self._rules.rule(name, " | ".join(way.text for way in ways))
        return arguments

    def _endless(self) -> set[str]:
        """Rules of which every way needs one of them."""
        ended, size = set[str](), -1
        while len(ended) > size:
            size = len(ended)
            ended |= {name for name, (_, ways) in self._made.items()
                      if any(way.needs & self._made.keys() <= ended for way in ways)}  # fmt: skip
        return self._made.keys() - ended

    def _value(self, schema: Any) -> str:
        """The rule of what a schema allows; what that refers to is in the function's."""
        if schema is True or schema == {}:
            return ANY
        text = json.dumps(schema)
        key = json.dumps([self._is_strict, text, self._root if "$ref" in text else ""])
        if key not in self._rules.names:
            self._rules.names[key] = f"v{len(self._rules.names)}"
            self._rest.append((self._rules.names[key], schema))
        return self._rules.names[key]

    def _ways(self, name: str, schema: Any) -> list[_Way]:
        try:
            found = list(leaves(schema, self._within))
            if len(found) > 1:
                return [_Way(rule, frozenset((rule,))) for rule in map(self._value, found)]
            ways = [way for leaf in found for way in self._ways_of(name, leaf)]
            if not ways:
                raise ValueError("its schema allows nothing")
        except ValueError:
            if self._is_strict:
                raise
            return [_anything(schema)]
        return ways

    def _ways_of(self, name: str, leaf: dict[str, Any]) -> Iterator[_Way]:
        values = listed_values(leaf)
        self._check(leaf, KNOWN if values is None else {"type", "enum", "const"})
        if values is not None:
            if texts := [value for value in values if isinstance(value, str)]:
                yield _Way(self._rules.one_of(texts))
            yield from (_Way(self._written(value)) for value in values if not isinstance(value, str))
            return
        if not leaf:
            yield _Way(ANY)
            return
        named = named_types(leaf)
        kinds = ANY_KIND if named is None else named
        numbers = [kind for kind in ("number", "integer") if kind in kinds]
        if numbers and (bounds := {key: leaf[key] for key in sorted(OF_NUMBERS & leaf.keys())}):
            part = f"{'-or-'.join(numbers)}-{len(self._rules.parts)}-of-{self._function}"
            yield _Way(self._rules.part({"type": numbers, **bounds}, part, is_strict=self._is_strict))
            kinds -= {*numbers}
        if "array" in kinds:
            yield self._list(leaf)
        if "object" in kinds:
            yield self._object(name, leaf)
        yield from (_Way(rule) for kind, rule in OF_KINDS.items() if kind in kinds - {"array", "object"})

    def _list(self, leaf: dict[str, Any]) -> _Way:
        items, (least, most) = leaf.get("items", True), self._sizes(leaf)
        is_of_some = "prefixItems" in leaf or not isinstance(items, dict | bool)  # and others are of other schemas
        if self._is_strict and is_of_some:
            raise ValueError("items that are unlike each other")
        if most == 0 or (items is False and not is_of_some):
            if least:
                raise ValueError("its schema allows nothing")
            return _Way('"[" "]"')
        item = ANY if is_of_some else self._value(items)
        more = f'("," {item})'
        some = joined(item, _times(more, max(least, 1) - 1, None if most is None else most - 1))
        return _Way(f'"[" {some} "]"', frozenset((item,))) if least else _Way(f'"[" ({some})? "]"')

    def _sizes(self, leaf: dict[str, Any]) -> tuple[int, int | None]:
        """How many a list has, at least and at most."""
        given = {key: leaf[key] for key in ("minItems", "maxItems") if key in leaf}
        if all(type(size) is int and 0 <= size <= MAX_CHOICES for size in given.values()):
            least, most = given.get("minItems", 0), given.get("maxItems")
            if most is None or least <= most:
                return least, most
        if self._is_strict:
            raise ValueError(f"minItems and maxItems that are not in order, or not within {MAX_CHOICES}")
        return 0, None

    def _object(self, name: str, leaf: Mapping[str, Any]) -> _Way:
        """With its keys in a row, of which those that are not required may be missing, and others behind them."""
        properties, required, others = self._parts(leaf)
        if not properties and not required and (others is True or others == {}):
            return _Way(OBJECT)
        keys = _in_order({**properties, **dict.fromkeys(required)})
        values = {key: self._value(properties.get(key, others)) for key in keys
                  if key in required or properties[key] is not False}  # fmt: skip
        pairs = [(joined(self._rules.key(key), value), key in required) for key, value in values.items()]
        some = self._in_a_row(name, pairs, "" if others is False else self._extra(name, keys, others))
        return _Way(joined('"{"', some, '"}"'), frozenset(values[key] for key in required))

    def _in_a_row(self, name: str, pairs: Sequence[tuple[str, bool]], extra: str) -> str:
        """Pairs with commas between them, each with whether it has to be there, and any number of `extra` behind.

        Of `a`, that may be missing, and `b`: (a r1 | b), where r1, what comes behind a, is "," b.
        """
        rest = f'("," {extra})*' if extra else ""
        starts = [f"{extra} {rest}"] if extra else []
        for number, (text, has_to_be) in reversed([*enumerate(pairs)]):
            pair = self._rules.rule(f"{name}p{number}", text)
            starts = [joined(pair, rest), *([] if has_to_be else starts)]
            rest = self._rules.rule(f"{name}r{number}", joined(f'"," {pair}' if has_to_be else f'("," {pair})?', rest))
        may_be_none = not any(has_to_be for _, has_to_be in pairs)
        return f"({' | '.join(starts)}){'?' if may_be_none else ''}" if starts else ""

    def _parts(self, leaf: Mapping[str, Any]) -> tuple[dict[str, Any], list[str], Any]:
        properties, required = leaf.get("properties", {}), leaf.get("required", [])
        others = leaf.get("additionalProperties", True)
        is_of_names = isinstance(required, list) and all(isinstance(key, str) for key in required)
        if not is_of_names or not isinstance(properties, dict) or not isinstance(others, dict | bool):
            raise ValueError("properties, required or additionalProperties that are none")
        if others is False and (missing := sorted(set(required) - set(properties))):
            raise ValueError(f"{shown(missing[0])} is required, and no property may have that name")
        return properties, required, others

    def _extra(self, name: str, keys: list[str], schema: Any) -> str:
        if not keys:
            return joined(KEY, '":"', self._value(schema))
        key = self._rules.rule(f"{name.upper()}_KEY", other_than(["", *keys], f"/{KEY_PATTERN}/"))
        return joined(key, '":"', self._value(schema))

    def _written(self, value: Any) -> str:
        """A value that a schema lists."""
        if isinstance(value, str):
            return self._rules.one_of([value])
        if isinstance(value, list):
            return joined('"["', ' "," '.join(map(self._written, value)), '"]"')
        if not isinstance(value, dict):
            return quoted(json.dumps(value))
        pairs = [joined(self._rules.key(key), self._written(value[key])) for key in _in_order(value)]
        return joined('"{"', ' "," '.join(pairs), '"}"')

    def _check(self, schema: Mapping[str, Any], known: set[str]) -> None:
        if self._is_strict:
            check_keys(schema, known)


def _anything(schema: Any) -> _Way:
    """Of the type that it names, if that is one."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    return _Way(OF_KINDS.get(kind, ANY) if isinstance(kind, str) else ANY)


def _times(text: str, least: int, most: int | None) -> str:
    """So often in a row."""
    if most is None:
        return joined(f"{text}{{{least}}}" if least else "", f"{text}*")
    return f"{text}{{{least},{most}}}" if most else ""


def _in_order(keys: Iterable[str]) -> list[str]:
    """As jinja's dictsort has them."""
    return sorted(keys, key=str.lower)
