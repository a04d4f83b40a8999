"""The grammar of calls of tools: for a chat that has to call one, or whose answer is bound where it does not.

As llguidance reads it: rules of its Lark, and a JSON schema for the arguments of each function. Must not know HTTP,
bodies of requests or the engine.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tpspec.serve.errors import bad_request
from tpspec.serve.grammars import json_schema, lark

if TYPE_CHECKING:
    from typing import Any

    from tpspec.serve.tools import Format, Toolbox

MOST_CALLS = 16  # in a row: a model that may call for ever sometimes does. Templates of bare calls know but one


def tool_grammar(toolbox: Toolbox, form: Format, marks_are_tokens: bool, answer: str = "") -> str:
    """answer: the grammar of JSON that may stand in place of calls, where none has to be. Raises ApiError.

    marks_are_tokens: of the vocabulary, by which a grammar has to name them; their letters would be other tokens.
    """
    if answer and toolbox.must:
        raise bad_request("tool_choice has tools called, and the answer is bound: not both", "tools", "invalid_value")
    if answer and not (form.opening and answer.startswith("{")):  # where a call begins as the answer may, or in Lark
        raise bad_request("with tools, this answer cannot be bound: use tool_choice none", "tools", "invalid_value")
    parts = {f"arguments_{i}": json_schema(schema, "tools") for i, schema in enumerate(toolbox.schemas.values())}
    parts |= {"answer": answer} if answer else {}
    more = f'("\\n" call){{0,{MOST_CALLS - 1}}}' if toolbox.parallel and form.opening else ""
    rules = [
        f"start: calls{' | @answer' if answer else ''}",
        f"calls: call {more}",
        f"call: {_mark(form.opening, marks_are_tokens, after=True)} body {_mark(form.closing, marks_are_tokens)}",
        f"body: {' | '.join(_body(name, i, form) for i, name in enumerate(toolbox.schemas))}",
    ]
    whole = [{"lark_grammar": "\n".join(rules)}, *(_named(name, text) for name, text in parts.items())]
    return lark(json.dumps({"grammars": whole}), "tools")


def _body(name: str, number: int, form: Format) -> str:
    begin = f'{{"name": "{name}", "{form.key}": '
    return f"{_quoted(begin)} @arguments_{number} {_quoted('}')}"


def _mark(mark: str, is_token: bool, *, after: bool = False) -> str:
    """With the line that ends after the opening one, or before the closing one."""
    if not mark:
        return ""
    word = mark if is_token else _quoted(mark)
    return f"{word} {_quoted(chr(10))}" if after else f"{_quoted(chr(10))} {word}"


def _quoted(text: str) -> str:
    return json.dumps(text)


def _named(name: str, grammar: str) -> dict[str, Any]:
    (only,) = json.loads(grammar)["grammars"]
    return {**only, "name": name}
