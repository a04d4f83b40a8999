"""The grammar of calls of tools: for a chat that has to call one, or whose answer or arguments are bound if it calls.

As llguidance reads it: rules of its Lark, and a JSON schema for the arguments of each function. Must not know HTTP,
bodies of requests or the engine.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tpspec.serve.errors import bad_request
from tpspec.serve.grammars import json_schema, lark
from tpspec.serve.reasoning import CHANNEL, CONSTRAIN, END, MESSAGE, START
from tpspec.serve.tools import ADDRESS

if TYPE_CHECKING:
    from typing import Any

    from tpspec.serve.tools import Format, Toolbox

MOST_CALLS = 16  # in a row: a model that may call for ever sometimes does. Templates of bare calls know but one
FREE = r"(.|\n)*"  # what is said between calls, up to the mark of the next
TO_FUNCTION = f'call: {CHANNEL} "commentary to={ADDRESS}" body'
TO_READER = f'said: {CHANNEL} ("analysis" | "commentary" | "final") {MESSAGE} FREE'
NO_OBJECT = r"[\s\x1c-\x1f]*([^{\s\x1c-\x1f](.|\n)*)?"  # what is no bare call


def tool_grammar(toolbox: Toolbox, form: Format, marks_are_tokens: bool, answer: str = "", thoughts: str = "") -> str:
    """answer: the grammar of JSON that may stand in place of calls, where none has to be. Raises ApiError.

    Without one, and where nothing has to be called, anything may be said beside calls, and thought before, as
    `thoughts` of a Splitter has it; and a function that is not strict takes any object.
    marks_are_tokens: of the vocabulary, by which a grammar has to name them; their letters would be other tokens.
    """
    if answer and toolbox.must:
        raise bad_request("tool_choice has tools called, and the answer is bound: not both", "tools", "invalid_value")
    has_marks = form.opening or form.is_addressed
    if answer and not (has_marks and answer.startswith("{")):  # where a call begins as the answer may, or in Lark
        raise bad_request("with tools, this answer cannot be bound: use tool_choice none", "tools", "invalid_value")
    is_free = not toolbox.must and not answer
    schemas = [
        schema if name in toolbox.strict or not is_free else {"type": "object"}
        for name, schema in toolbox.schemas.items()
    ]
    parts = {f"arguments_{i}": json_schema(schema, "tools") for i, schema in enumerate(schemas)}
    parts |= {"answer": answer} if answer else {}
    rules = [
        *(_free_calls(toolbox, form, marks_are_tokens) if is_free else _calls(toolbox, form, marks_are_tokens)),
        f"body: {' | '.join(_body(name, i, form) for i, name in enumerate(toolbox.schemas))}",
        f"start: {thoughts if is_free else ''} calls{f' | {_final(form)} @answer' if answer else ''}",
        f"FREE: /{FREE}/",
    ]
    whole = [{"lark_grammar": "\n".join(rules)}, *(_named(name, text) for name, text in parts.items())]
    return lark(json.dumps({"grammars": whole}), "tools")


def _calls(toolbox: Toolbox, form: Format, marks_are_tokens: bool) -> list[str]:
    if form.is_addressed:
        return ["calls: call", TO_FUNCTION]
    more = f'("\\n" call){{0,{MOST_CALLS - 1}}}' if toolbox.parallel and form.opening else ""
    return [
        f"calls: call {more}",
        f"call: {_mark(form.opening, marks_are_tokens)} {_rest(form, marks_are_tokens)}",
    ]


def _free_calls(toolbox: Toolbox, form: Format, marks_are_tokens: bool) -> list[str]:
    """Beside text. Marks that are tokens may be spelled all the same, and are read then, too."""
    if form.is_addressed:
        return [f'calls: (said {END} {START} "assistant")* (said | call)', TO_READER, TO_FUNCTION]
    if not form.opening:
        return ["calls: body | said", f"said: /{NO_OBJECT}/"]
    return [
        f"calls: {'call* FREE' if toolbox.parallel else 'call | FREE'}",
        f"call: ({f'FREE {form.opening} | ' if marks_are_tokens else ''}spelled) {_rest(form, marks_are_tokens)}",
        f"spelled[lazy]: FREE {_quoted(form.opening)}",
    ]


def _body(name: str, number: int, form: Format) -> str:
    if form.is_addressed:
        return f'"{name} " {CONSTRAIN} "json" {MESSAGE} @arguments_{number}'
    begin = f'{{"name": "{name}", "{form.key}": '
    return f"{_quoted(begin)} @arguments_{number} {_quoted('}')}"


def _final(form: Format) -> str:
    """What stands before an answer that is no call."""
    return f'{CHANNEL} "final" {MESSAGE}' if form.is_addressed else ""


def _rest(form: Format, marks_are_tokens: bool) -> str:
    """Of a call, after the mark that opens it: marks have lines of their own."""
    line = _quoted("\n")
    return f"{line} body {line} {_mark(form.closing, marks_are_tokens)}" if form.opening else "body"


def _mark(mark: str, is_token: bool) -> str:
    return mark if is_token or not mark else _quoted(mark)


def _quoted(text: str) -> str:
    return json.dumps(text)


def _named(name: str, grammar: str) -> dict[str, Any]:
    (only,) = json.loads(grammar)["grammars"]
    return {**only, "name": name}
