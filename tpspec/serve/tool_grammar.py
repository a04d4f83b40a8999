"""The grammar of calls of tools: for a chat that has to call one, or whose answer or arguments are bound if it calls.

As llguidance reads it: rules of its Lark, and JSON schemas for the arguments of each function. Must not know HTTP,
bodies of requests or the engine.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tpspec.serve.arguments import is_deep
from tpspec.serve.call_formats import Json, JsonList, Named, Unquoted
from tpspec.serve.errors import bad_request
from tpspec.serve.grammars import MAX_DEPTH, arguments_schema, lark
from tpspec.serve.lark import ANYTHING, FREE, joined, marked, quoted, up_to
from tpspec.serve.reasoning import CHANNEL, CONSTRAIN, END, MESSAGE, START
from tpspec.serve.schemas import is_of_objects
from tpspec.serve.tagged_calls import Tagged
from tpspec.serve.tagged_grammar import TaggedRules
from tpspec.serve.tool_faults import NO_OBJECT, fault_of
from tpspec.serve.tools import ADDRESS
from tpspec.serve.unquoted_grammar import UnquotedRules

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from tpspec.serve.call_formats import Format
    from tpspec.serve.tools import Toolbox

MOST_CALLS = 16  # in a row: a model that may call for ever sometimes does. Templates of bare calls know but one
TO_FUNCTION = f'call: {CHANNEL} "commentary to={ADDRESS}" body'
TO_READER = f'said: {CHANNEL} ("analysis" | "commentary" | "final") {MESSAGE} {FREE}'
# Of forms whose arguments are no JSON.
OWN_RULES: dict[type, Callable[[Any, Mapping[str, int]], TaggedRules | UnquotedRules]] = {
    Tagged: TaggedRules,
    Unquoted: UnquotedRules,
}
SHORT_ID = "ID: /[a-zA-Z0-9]{9}/"
NO_CALL = r"[\s\x1c-\x1f]*([^{\s\x1c-\x1f](.|\n)*)?"  # what is no bare call


def tool_grammar(
    toolbox: Toolbox,
    style: Format,
    added: Mapping[str, int],
    answer: tuple[str, str] = ("", ""),
    thoughts: str = "",
) -> str:
    """style: in which calls are written. answer: the field that asks for it, and the grammar of JSON that may stand in
    their place. Raises ApiError.

    Without one, and where nothing has to be called, anything may be said beside calls, and thought before, as
    `thoughts` of a Splitter has it; and a function that is not strict takes any object. Where it has to be called, what
    of its schema cannot bind it binds nothing.
    added: the words of the vocabulary that are one token each, with its id.
    """
    field, bound = answer
    if bound and toolbox.must:
        raise bad_request("tool_choice has tools called, and the answer is bound: not both", "tools", "invalid_value")
    has_marks = style.opening or style.is_addressed
    if bound and not (has_marks and _is_of_json(bound)):  # where a call begins as the answer may
        raise bad_request("with tools, this answer cannot be bound: use tool_choice none", "tools", "invalid_value")
    is_free = not toolbox.must and not bound
    bodies, parts = _bodies(toolbox, style, added, is_free)
    parts |= {field: bound} if bound else {}
    rules = [
        *(_free_calls(toolbox, style, added) if is_free else _calls(toolbox, style, added)),
        *bodies,
        f"start: {thoughts if is_free else ''} calls{f' | {_final(style)} @{field}' if bound else ''}",
        ANYTHING,
        *([SHORT_ID] if style.short_ids else []),
    ]
    whole = [{"lark_grammar": "\n".join(rules)}, *(_named(name, text) for name, text in parts.items())]
    return lark(json.dumps({"grammars": whole}), "tools")


def _calls(toolbox: Toolbox, style: Format, added: Mapping[str, int]) -> list[str]:
    if style.is_addressed:
        return ["calls: call", TO_FUNCTION]
    more = _more(joined(quoted(style.between), "call")) if toolbox.parallel and _is_repeated(style) else ""
    return [
        f"calls: call {more}",
        f"call: {joined(marked(style.opening, added), _rest(style, added, toolbox.parallel))}",
    ]


def _free_calls(toolbox: Toolbox, style: Format, added: Mapping[str, int]) -> list[str]:
    """Beside text."""
    if style.is_addressed:
        return [f'calls: (said {END} {START} "assistant")* (said | call)', TO_READER, TO_FUNCTION]
    if not style.opening:
        return ["calls: body | said", f"said: /{NO_CALL}/"]
    return [
        f"calls: {f'call* {FREE}' if toolbox.parallel else f'call | {FREE}'}",
        f"call: opened {_rest(style, added, toolbox.parallel)}",
        *(f"{rule}: {text}" for rule, text in up_to("opened", FREE, style.opening, added).items()),
    ]


def _rest(style: Format, added: Mapping[str, int], parallel: bool) -> str:
    """Of a call, after the mark that opens it."""
    if isinstance(style.form, JsonList):
        more = _more('", " body') if parallel else ""
        return f'/ ?/ "[" body {more} "]"'
    more = _more(joined(quoted(style.gap), "body")) if parallel and style.form.many else ""
    return joined(quoted(style.gap), "body", more, quoted(style.gap), marked(style.closing, added))


def _is_repeated(style: Format) -> bool:
    """Whether there is a mark for each of several calls."""
    return bool(style.opening) and not style.form.many and not isinstance(style.form, JsonList)


def _more(one: str) -> str:
    return f"({one}){{0,{MOST_CALLS - 1}}}"


def _bodies(
    toolbox: Toolbox, style: Format, added: Mapping[str, int], is_free: bool
) -> tuple[list[str], dict[str, str]]:
    """Rules of what stands in a call, and the grammars that they refer to, by name."""
    bound = {name: not is_free or name in toolbox.strict for name in toolbox.schemas}
    if (rules := OWN_RULES.get(type(style.form))) is not None:
        made = rules(style.form, added)
        for i, (name, schema) in enumerate(toolbox.schemas.items()):
            made.add(f"body_{i}", name, schema, is_bound=bound[name], is_strict=name in toolbox.strict)
        names = " | ".join(f"body_{i}" for i in range(len(bound)))
        return [f"body: {names}", *made.rules], made.parts
    ways = [_body(name, style, added) for name in toolbox.schemas]
    parts = {
        _arguments_of(name): _arguments(name, schema if bound[name] else {}, is_strict=name in toolbox.strict)
        for name, schema in toolbox.schemas.items()
    }
    return [f"body: {' | '.join(ways)}"], parts


def _body(name: str, style: Format, added: Mapping[str, int]) -> str:
    arguments = f"@{_arguments_of(name)}"
    if style.is_addressed:
        return f'"{name} " {CONSTRAIN} "json" {MESSAGE} {arguments}'
    if isinstance(style.form, Named):
        id = _id(marked(style.form.id_mark, added))
        return f"{quoted(name)} {id} {marked(style.form.mark, added)} {arguments}"
    assert isinstance(style.form, Json | JsonList)
    begin = f'{{"name": "{name}", "{style.form.key}": '
    id = _id(quoted(', "id": "'), quoted('"')) if style.short_ids else ""
    return joined(quoted(begin), arguments, id, quoted("}"))


def _arguments(name: str, schema: Mapping[str, Any], *, is_strict: bool) -> str:
    """Of an object, whatever else the schema allows: nothing else is read. Raises ApiError."""
    if not is_of_objects(schema):
        if is_strict:
            raise fault_of(name, NO_OBJECT)
        schema = {}
    return arguments_schema({**schema, "type": "object"}, is_strict=is_strict)


def _arguments_of(name: str) -> str:
    """What the grammar of a function's arguments is called, also in what clients are told of a fault."""
    return f"arguments-of-{name}"


def _id(before: str, behind: str = "") -> str:
    """Which older templates show, and their models write."""
    return f"({joined(before, 'ID', behind)})?"


def _final(style: Format) -> str:
    """What stands before an answer that is no call."""
    return f'{CHANNEL} "final" {MESSAGE}' if style.is_addressed else ""


def _is_of_json(grammar: str) -> bool:
    """Whether it is a schema's, and not Lark, or what else a client made up."""
    try:
        (only,) = json.loads(grammar)["grammars"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return False
    return isinstance(only, dict) and "json_schema" in only and not is_deep(only, MAX_DEPTH + 1)


def _named(name: str, grammar: str) -> dict[str, Any]:
    (only,) = json.loads(grammar)["grammars"]
    return {**only, "name": name}
