"""The grammar of calls with tags around each argument: rules of llguidance's Lark for a function and its schema.

A string stands between its tags as it is, so its own closing tag ends it; anything else is JSON. Arguments come in the
order of the schema. What is let through, `arguments` reads as a value that the schema allows; where a function is not
strict, what of its schema cannot bind a call binds none. Must not know HTTP, bodies of requests or what stands around
calls.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tpspec.serve.arguments import LONGEST_KEY, Arguments
from tpspec.serve.choices import BEGINNINGS, LETTERS, Choices, check_keys, self_contained, shown
from tpspec.serve.errors import ApiError
from tpspec.serve.grammars import MAX_TOOLS_CHARS, arguments_schema, check_size, check_tools
from tpspec.serve.lark import FREE, joined, marked, other_than, quoted, up_to
from tpspec.serve.schemas import Schema, is_of_objects
from tpspec.serve.tagged_calls import ValueEnd
from tpspec.serve.tool_faults import NO_OBJECT, fault_of, unbound

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from tpspec.serve.tagged_calls import Tagged

OF_FUNCTIONS = {"type", "properties", "required", "additionalProperties"}
OF_ANY = {"minProperties", "maxProperties", "dependentRequired", "propertyNames"}  # which name no argument of their own
WORD = re.compile(r"\w{1,64}", re.ASCII)  # which may be part of a grammar's name


@dataclass(frozen=True, slots=True)
class _Function:
    """rule: of its calls. is_strict: what cannot bind them is refused, and does not otherwise."""

    rule: str
    name: str
    arguments: Arguments
    is_strict: bool

    @property
    def schema(self) -> Schema:
        return self.arguments.schema


class TaggedRules:
    """Of the functions that are added, one by one. parts: grammars of the values that `rules` refer to, by name."""

    def __init__(self, form: Tagged, added: Mapping[str, int]) -> None:
        self._form, self._added = form, added
        self.parts: dict[str, str] = {}
        self.rules: list[str] = []
        self._texts: dict[str, str] = {}  # rules of them, by letters with which they may not begin
        self._names: dict[str, str] = {}  # of rules and parts, by what they say: functions share them
        self._num_chars = 0
        self._key = self._rule("KEY", self._any_key)
        self._any = self._rule("argument", self._argument(self._key, self._text("")))

    def add(self, rule: str, name: str, schema: Mapping[str, Any], *, is_bound: bool, is_strict: bool) -> None:
        """A rule of a function's calls. Raises ApiError where a strict one's schema cannot bind them."""
        function = _Function(rule, name, Arguments(schema), is_strict)
        if is_bound:
            check_size(schema, "tools")
            arguments = _bound(function, lambda: " ".join(self._arguments(function)), lambda: self._free(function))
        else:
            arguments = self._free(function)
        before, behind = (marked(one, self._added) for one in self._form.name)
        head = joined(before, quoted(name), behind, quoted(self._form.gap))
        self._rule(rule, joined(head, arguments, marked(self._form.end, self._added)))
        check_tools(self._num_chars)

    def _free(self, function: _Function) -> str:
        """Any arguments. One that is a list or an object by its schema is read as JSON, to its end."""
        by_letters: dict[str, list[str]] = {}
        for key in filter(self._is_tag, function.schema.properties):
            by_letters.setdefault(function.arguments.json_letters(key), []).append(key)
        others = function.arguments.json_letters(None)
        by_letters.pop(others, None)
        if not by_letters and not others:
            return f"{self._any}*"
        named = [key for keys in by_letters.values() for key in keys]
        other_key = self._rule(f"{function.rule.upper()}_KEY", other_than(named, self._any_key))
        by_key = {f"({' | '.join(map(quoted, keys))})": letters for letters, keys in by_letters.items()}
        by_key[other_key] = others
        return f"({' | '.join(self._argument(key, self._free_value(letters)) for key, letters in by_key.items())})*"

    def _free_value(self, letters: str) -> str:
        """With what closes it. letters: with which it is JSON."""
        if not letters:
            return self._text("")
        kinds = [kind for kind, letter in LETTERS.items() if letter in letters]
        part = self._part(f"any-{'-or-'.join(kinds)}", arguments_schema({"type": kinds}, is_strict=False))
        return f"({self._closed([f'@{part}'])} | {self._text(''.join(BEGINNINGS[kind] for kind in kinds))})"

    def _arguments(self, function: _Function) -> Iterator[str]:
        rule, name, said = function.rule, function.name, function.schema
        required, others = _checked(function)
        if others is False and (missing := sorted(set(required) - set(said.properties))):
            raise fault_of(name, f"{shown(missing[0])} is required, and no property may have that name")
        keys = list({**said.properties, **dict.fromkeys(required)})
        if not keys and others is not False:
            yield f"{self._rule_of(f'{rule}_any', None, function)}*"
        for number, key in enumerate(keys):
            if not self._is_tag(key):
                raise fault_of(name, f"no tag can have {shown(key)!r} for its name")
            its_rule = self._rule_of(f"{rule}_{number}", key, function)
            yield its_rule if key in required else f"{its_rule}?"

    def _rule_of(self, rule: str, key: str | None, function: _Function) -> str:
        letters = function.arguments.json_letters(key)
        value = _bound(function, lambda: self._value(rule, key, function), lambda: self._free_value(letters))
        return self._rule(rule, self._argument(self._key if key is None else quoted(key), value))

    def _rule(self, name: str, text: str) -> str:
        """The name of one that says so."""
        if text not in self._names:
            self._names[text] = name
            self._num_chars += len(text)
            self.rules.append(f"{name}: {text}")
        return self._names[text]

    def _argument(self, key: str, value: str) -> str:
        """value: with what closes it."""
        form, gap = self._form, self._form.gap if self._form.value[0] else ""
        key_open, key_close = (marked(one, self._added) for one in form.key)
        before = joined(key_open, key, key_close, quoted(gap), marked(form.value[0], self._added), quoted(form.pad))
        return joined(before, value, quoted(form.gap))

    def _value(self, rule: str, key: str | None, function: _Function) -> str:
        """With what closes it."""
        name = function.name if key is None else f"{function.name}.{shown(key)}"
        try:
            choices = Choices(function.schema.schema_of(key), function.schema, is_lenient=not function.is_strict)
            json_ways = [f"@{self._json(rule, key, function, choices.others)}"] if choices.others else []
        except ValueError as fault:
            raise unbound(name, fault) from fault
        listed, letters = list(map(_written, choices.listed)), function.arguments.json_letters(key)
        if not all(self._is_whole(text, letters) for text in listed):
            raise fault_of(name, f"{self._form.value[1]} would end a value that holds it, or begins as a list does")
        ways = [*map(json.dumps, listed), *map(quoted, choices.words), *json_ways]
        closed = [self._closed(ways)] if ways else []
        texts = [self._text(choices.no_beginnings)] if choices.has_texts else []
        return texts[0] if texts and not choices.no_beginnings else f"({' | '.join(closed + texts)})"

    def _json(self, rule: str, key: str | None, function: _Function, schemas: list[dict[str, Any]]) -> str:
        """The name of the part, as clients are told of a fault. Raises ValueError."""
        shown_key = f"-{key}" if key and WORD.fullmatch(key) else rule.removeprefix(function.rule)
        grammar = arguments_schema(self_contained(schemas, function.schema), is_strict=function.is_strict)
        if self._num_chars + len(grammar) > MAX_TOOLS_CHARS and grammar not in self._names:
            raise ValueError(f"schemas with what they refer to, of more than {MAX_TOOLS_CHARS} characters in all")
        return self._part(f"argument{shown_key}-of-{function.name}", grammar)

    def _is_tag(self, key: str) -> bool:
        """Whether it can stand in one."""
        return key.strip() == key and 0 < len(key) <= LONGEST_KEY and not set(key) & {*self._form.barred, "\n"}

    @property
    def _any_key(self) -> str:
        return f"/{self._form.any_key}/"

    def _is_whole(self, text: str, letters: str) -> bool:
        """Whether a value is read up to its end, and no further. letters: with which it is JSON."""
        pad, closing = self._form.pad, self._form.value[1]
        padded = f"{pad}{text}{pad}"
        return ValueEnd(closing, 0, letters).find(padded + closing) == len(padded)

    def _closed(self, ways: list[str]) -> str:
        return joined(f"({' | '.join(ways)})", quoted(self._form.pad), marked(self._form.value[1], self._added))

    def _part(self, name: str, grammar: str) -> str:
        """The name of one that says so."""
        if grammar not in self._names:
            self._names[grammar] = name
            self._num_chars += len(grammar)
            self.parts[name] = grammar
        return self._names[grammar]

    def _text(self, no_beginnings: str) -> str:
        """The rule of a text with what closes it.

        no_beginnings: with which of these letters it may not begin, after blanks.
        """
        if no_beginnings not in self._texts:
            rule = self._texts[no_beginnings] = f"text_{len(self._texts)}"
            text, closing = FREE, self._form.value[1]
            if no_beginnings:
                text = rule.upper()
                self._rule(text, rf"/[ \t\r\n]*([^ \t\r\n{no_beginnings}](.|\n)*)?/")
            for name, says in up_to(rule, text, closing, self._added).items():
                self._rule(name, says)
        return self._texts[no_beginnings]


def _bound(function: _Function, make: Callable[[], str], otherwise: Callable[[], str]) -> str:
    try:
        return make()
    except ApiError:
        if function.is_strict:
            raise
        return otherwise()


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _checked(function: _Function) -> tuple[list[str], Any]:
    """The arguments that a function has to have, and the schema of those that are not named. Raises ApiError."""
    name, root, whole = function.name, function.schema.root, function.schema.object
    known = OF_FUNCTIONS if function.is_strict else OF_FUNCTIONS | OF_ANY
    try:
        check_keys(root, known | {"$ref"})
        check_keys(whole, known)
    except ValueError as fault:
        raise unbound(name, fault) from fault
    required, others = whole.get("required", []), whole.get("additionalProperties", True)
    is_of_names = isinstance(required, list) and all(isinstance(key, str) for key in required)
    is_of_schemas = isinstance(whole.get("properties", {}), dict) and isinstance(others, dict | bool)
    is_lost = "$ref" in root and not whole
    if is_lost or not is_of_objects(whole) or not is_of_names or not is_of_schemas:
        raise fault_of(name, NO_OBJECT)
    return required, others
