"""The grammar of calls with tags around each argument: rules of llguidance's Lark for a function and its schema.

A string stands between its tags as it is, so its own closing tag ends it; anything else is JSON. Arguments come in the
order of the schema. Must not know HTTP, bodies of requests or what stands around calls.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tpspec.serve.arguments import MAX_REFS, kinds_of, listed_values, referred
from tpspec.serve.errors import bad_request
from tpspec.serve.grammars import check_size
from tpspec.serve.lark import FREE, joined, marked, quoted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tpspec.serve.call_formats import Tagged

DEFINITIONS = ("$defs", "definitions")
SAYS_NOTHING = frozenset(("title", "description", "default", "examples", "format", "deprecated", "$comment"))
OF_OBJECTS = SAYS_NOTHING | {"type", "properties", "required", "additionalProperties", "$schema", "$id", *DEFINITIONS}
BRANCHES = ("anyOf", "oneOf", "allOf")


class TaggedRules:
    """Of the functions that are added, one by one. schemas: of the values that `rules` refer to."""

    def __init__(self, form: Tagged, added: Mapping[str, int]) -> None:
        self._form, self._added = form, added
        self.schemas: dict[str, dict[str, Any]] = {}
        self.rules = [
            f"text: {self._up_to(form.value[1])}",
            f"text_spelled[lazy]: {FREE} {quoted(form.value[1])}",
            f"argument: {joined(self._before('KEY'), 'text', quoted(form.gap))}",
            "KEY: /[^<>\\n]+/",
        ]

    def add(self, rule: str, name: str, schema: Mapping[str, Any], *, is_bound: bool) -> None:
        """A rule of a function's calls. Raises ApiError where its schema is to bind them and cannot."""
        arguments = " ".join(self._arguments(rule, name, schema)) if is_bound else "argument*"
        before, behind = (marked(one, self._added) for one in self._form.name)
        head = joined(before, quoted(name), behind, quoted(self._form.gap))
        self.rules.append(f"{rule}: {joined(head, arguments, marked(self._form.end, self._added))}")

    def _arguments(self, rule: str, name: str, schema: Mapping[str, Any]) -> Iterator[str]:
        check_size(schema, "tools")
        _check_keys(name, schema, OF_OBJECTS)
        properties, required = schema.get("properties", {}), schema.get("required", [])
        is_of_names = isinstance(required, list) and all(isinstance(key, str) for key in required)
        if schema.get("type", "object") != "object" or not isinstance(properties, dict) or not is_of_names:
            raise bad_request(f"tools: {name}: parameters should be the schema of an object", "tools", "invalid_value")
        if not properties and not required and schema.get("additionalProperties", True) is not False:
            yield "argument*"
        arguments: dict[str, Any] = {key: {} for key in required} | properties
        for number, (key, inner) in enumerate(arguments.items()):
            if key.strip() != key or not key or set(key) & set("<>\n"):
                raise bad_request(f"tools: {name}: no tag can have {key!r} for its name", "tools", "invalid_value")
            its_rule = f"{rule}_{number}"
            value = self._value(its_rule, f"{name}.{key}", inner, schema)
            self.rules.append(f"{its_rule}: {joined(self._before(quoted(key)), value, quoted(self._form.gap))}")
            yield its_rule if key in required else f"{its_rule}?"

    def _value(self, rule: str, name: str, schema: Any, root: Mapping[str, Any]) -> str:
        """With what closes it."""
        leaves, closing = list(_leaves(schema, root, set())), self._form.value[1]
        listed = [value for leaf in leaves for value in listed_values(leaf) or ()]
        others = [leaf for leaf in leaves if listed_values(leaf) is None]
        texts = [leaf for leaf in others if "string" in kinds_of(leaf, root)]
        for leaf in texts:
            _check_keys(name, leaf, SAYS_NOTHING | {"type"})
        if texts:
            return "text"
        if any(isinstance(value, str) and closing in value for value in listed):
            raise bad_request(f"tools: {name}: {closing} would end a value that holds it", "tools", "invalid_value")
        ways = [quoted(value) if isinstance(value, str) else quoted(json.dumps(value)) for value in listed]
        if others:
            definitions = {key: root[key] for key in DEFINITIONS if key in root}
            self.schemas[f"{rule}_value"] = {"anyOf": others, **definitions}
            ways.append(f"@{rule}_value")
        return joined(f"({' | '.join(ways)})", quoted(self._form.pad), marked(closing, self._added))

    def _before(self, key: str) -> str:
        form, gap = self._form, self._form.gap if self._form.value[0] else ""
        key_open, key_close = (marked(one, self._added) for one in form.key)
        return joined(key_open, key, key_close, quoted(gap), marked(form.value[0], self._added), quoted(form.pad))

    def _up_to(self, closing: str) -> str:
        """Marks that are tokens may be spelled all the same, and are read then, too."""
        by_token = f"{FREE} {marked(closing, self._added)} | " if closing in self._added else ""
        return f"{by_token}text_spelled"


def _leaves(schema: Any, root: Mapping[str, Any], seen: set[str]) -> Iterator[dict[str, Any]]:
    """What a schema offers to choose from, without those that it refers to twice."""
    schema = schema if isinstance(schema, dict) else {}
    ref, branches = schema.get("$ref"), next((schema[key] for key in BRANCHES if key in schema), None)
    is_alone = len(set(schema) - SAYS_NOTHING) == 1
    if is_alone and isinstance(ref, str) and len(seen) < MAX_REFS and (target := referred(ref, root)) is not None:
        if ref not in seen:
            seen.add(ref)
            yield from _leaves(target, root, seen)
    elif is_alone and isinstance(branches, list) and ("allOf" not in schema or len(branches) == 1):
        for branch in branches:
            yield from _leaves(branch, root, seen)
    else:
        yield schema


def _check_keys(name: str, schema: Mapping[str, Any], known: frozenset[str]) -> None:
    if others := sorted(set(schema) - known):
        raise bad_request(
            f"tools: {name}: {', '.join(others)} cannot bind a call as this model writes it; leave it out, or leave "
            "tool_choice at auto and the function not strict",
            "tools",
            "invalid_value",
        )
