"""Grammars of calls: what they let through is read back as the calls it is, and nothing else is let through."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis.strategies import DataObject, data, lists, sampled_from
from tokenizers import Tokenizer

from tests.serve.written_calls import (
    EACH,
    ELSEWHERE,
    FORMS,
    HERMES,
    LLAMA,
    LOOK,
    LOOSE,
    PAIR,
    SCHEMAS,
    SMALL,
    TELL,
    WAIT,
    accepts,
    made,
    read,
    written,
)
from tpspec.grammar import Vocabulary, json_schema
from tpspec.serve.call_formats import Format, Unquoted
from tpspec.serve.chats import ChatBody, Message, Tool
from tpspec.serve.errors import ApiError
from tpspec.serve.responses import ResponsesBody


@EACH
def test_calls_are_let_through_and_read_back(vocabulary: Path, form: Format) -> None:
    grammar = made(vocabulary, form)
    for calls in ([LOOK], [WAIT], [TELL], [("tell", {"word": "", "far": False})], [LOOK, WAIT, TELL]):
        if form.opening or len(calls) == 1:
            text = written(form, *calls)
            assert accepts(vocabulary, grammar, text)
            assert read(form, text) == ("", calls)


@EACH
def test_nothing_else_is(vocabulary: Path, form: Format) -> None:
    grammar = made(vocabulary, form)
    for text in (
        "No.",
        written(form, ELSEWHERE),
        written(form, ("rm", {})),
        written(form, ("tell", {"word": "a"})),
        written(form, ("tell", {"word": "a", "far": "not"})),
        written(form, ("tell", TELL[1] | {"at": ["a"]})),
        written(form, LOOSE),
        written(form, *[WAIT] * 17),
        "No. " + written(form, WAIT),
    ):
        assert not accepts(vocabulary, grammar, text)
    one = made(vocabulary, form, parallel=False)
    assert accepts(vocabulary, one, written(form, WAIT))
    assert not accepts(vocabulary, one, written(form, WAIT, WAIT))


@EACH
def test_where_nothing_has_to_be_called_a_strict_function_keeps_its_schema(vocabulary: Path, form: Format) -> None:
    """`strict` under tool_choice auto was read and forgotten."""
    grammar = made(vocabulary, form, must=False, strict=frozenset({"look"}))
    for call in (LOOK, WAIT, LOOSE):
        assert accepts(vocabulary, grammar, written(form, call))
    for call in (ELSEWHERE, ("rm", {})):
        assert not accepts(vocabulary, grammar, written(form, call))
    for said in ("", "No.", " \n", "a {} b", "日本 < 3"):
        assert accepts(vocabulary, grammar, said)
    assert not accepts(vocabulary, made(vocabulary, form, must=False, parallel=False), written(form, WAIT, WAIT))


def test_a_function_without_parameters_is_called_without_arguments(vocabulary: Path) -> None:
    """Stands against arguments that a bound model invents; OpenAI: to leave parameters out is an empty list of them."""
    function: dict[str, Any] = {"name": "wait"}
    chat = ChatBody(
        messages=[Message(role="user", content="a")],
        tools=[Tool.model_validate({"type": "function", "function": function})],
        tool_choice="required",
    )
    response = ResponsesBody.model_validate(
        {"input": "a", "tools": [{"type": "function", **function}], "tool_choice": "required"}
    )
    for body in (chat, response):
        assert body.toolbox is not None
        grammar = made(vocabulary, HERMES, schemas=body.toolbox.schemas)
        assert accepts(vocabulary, grammar, written(HERMES, WAIT))
        assert not accepts(vocabulary, grammar, written(HERMES, LOOSE))


def test_what_is_said_around_calls_is_free_but_no_call_hides_in_it(vocabulary: Path) -> None:
    """A mark that is a token can be spelled by others, which the reader takes for the same."""
    grammar = made(vocabulary, HERMES, must=False, strict=frozenset(SCHEMAS))
    look, elsewhere = written(HERMES, LOOK), written(HERMES, ELSEWHERE)
    assert accepts(vocabulary, grammar, f"So. {look} And {look}\nDone.")
    assert not accepts(vocabulary, grammar, f"So. {look} And {elsewhere}")
    matcher, tokenizer = Vocabulary(vocabulary).matcher(grammar), Tokenizer.from_file(str(vocabulary))
    ids = [id for part in (elsewhere[:5], elsewhere[5:]) for id in tokenizer.encode(part, add_special_tokens=False).ids]
    assert matcher.try_consume_tokens(ids) < len(ids)


@EACH
@settings(max_examples=25, deadline=None)
@given(data=data())
def test_no_call_read_out_of_what_was_let_through_breaks_its_schema(
    vocabulary: Path, form: Format, data: DataObject
) -> None:
    """Grammar and reader are two programs, and could each have their own idea of where a call begins."""
    whole = [written(form, call) for call in (LOOK, WAIT, ELSEWHERE, TELL)]
    parts = data.draw(
        lists(sampled_from([*whole, *form.marks, "look", "at", "日本", *"{ \n;", "No.", "<tool_"]), max_size=6)
    )
    text = "".join(parts)
    if accepts(vocabulary, made(vocabulary, form, must=False, strict=frozenset(SCHEMAS)), text):
        _, found = read(form, text, lenient=False)
        for name, arguments in found:
            jsonschema.validate(arguments, SCHEMAS[name])


NULLS: list[dict[str, Any]] = [
    {"properties": {"a": SMALL}},
    {"type": ["object", "null"], "properties": {"a": SMALL}},
    {"anyOf": [PAIR, {"type": "null"}]},
    {"$ref": "#/$defs/A", "$defs": {"A": {"properties": {"a": SMALL}}}},
    {"type": "null"},
]


@pytest.mark.parametrize("form", [HERMES, LLAMA, FORMS["mistral"], FORMS["mistral-list"]], ids=lambda form: form.name)
@pytest.mark.parametrize("schema", NULLS, ids=str)
def test_arguments_are_an_object_whatever_else_their_schema_allows(
    vocabulary: Path, form: Format, schema: dict[str, Any]
) -> None:
    """A schema that left out its type let null through, which no reader takes for arguments: the call was lost."""
    for strict in (frozenset("f"), frozenset[str]()):
        if strict and schema == {"type": "null"}:
            with pytest.raises(ApiError, match="f: parameters should be the schema of an object"):
                made(vocabulary, form, schemas={"f": schema}, strict=strict)
            continue
        grammar, text = made(vocabulary, form, schemas={"f": schema}, strict=strict), written(form, ("f", {"b": 2}))
        assert accepts(vocabulary, grammar, text)
        for none in ("null", "[1]"):
            assert not accepts(vocabulary, grammar, text.replace('{"b": 2}', none))


@EACH
@pytest.mark.parametrize("strict", [frozenset("f"), frozenset[str]()], ids=["strict", "forced"])
def test_a_property_of_a_bound_function_has_no_other_name(
    vocabulary: Path, form: Format, strict: frozenset[str]
) -> None:
    """Spelled with an escape it passed for one of which the schema says nothing, and was read as what it is."""
    is_json = not isinstance(form.form, Unquoted)
    patterned: list[dict[str, Any]] = [{"patternProperties": {"b": {}}}] if is_json else []
    for others in ({}, {"additionalProperties": {"type": "string"}}, *patterned):
        schema = {"properties": {"o": {"type": "object", "properties": {"a": SMALL}} | others}}
        text = written(form, ("f", {"o": {"c": "x"}}))
        grammar = made(vocabulary, form, schemas={"f": schema}, strict=strict)
        assert accepts(vocabulary, grammar, text)
        spelled = text.replace('"c"', r'"\u0061"') if is_json else text.replace("c:", " a:")
        assert not accepts(vocabulary, grammar, spelled)


def test_strings_may_hold_what_only_an_escape_can_say(vocabulary: Path) -> None:
    """Unless it would undo what binds: see above."""
    schema = {"properties": {"o": {"type": "string"}}, "additionalProperties": False}
    grammar = made(vocabulary, HERMES, schemas={"f": schema}, strict=frozenset("f"))
    assert accepts(vocabulary, grammar, written(HERMES, ("f", {"o": "\x1b[0m"})))


@EACH
def test_what_is_referred_to_stays_wherever_it_stands(vocabulary: Path, form: Format) -> None:
    """What clients call `x-...` was taken out as a note, and then was missed."""
    schema = {"properties": {"a": {"$ref": "#/x-types/T"}}, "x-types": {"T": SMALL}, "x-order": ["a"]}
    grammar = made(vocabulary, form, schemas={"f": schema}, strict=frozenset("f"))
    assert accepts(vocabulary, grammar, written(form, ("f", {"a": 20})))
    assert not accepts(vocabulary, grammar, written(form, ("f", {"a": 21})))


def test_calls_as_older_templates_show_them_are_let_through(vocabulary: Path) -> None:
    """Their models write an id, which a bound answer forbade them."""
    for name, text in {
        "mistral": '[TOOL_CALLS]wait[CALL_ID]a1b2c3d4e[ARGS]{}[TOOL_CALLS]look[ARGS]{"at": "here"}',
        "mistral-list": '[TOOL_CALLS] [{"name": "wait", "arguments": {}, "id": "a1b2c3d4e"}]',
    }.items():
        assert accepts(vocabulary, made(vocabulary, FORMS[name]), text)
        said, calls = read(FORMS[name], text)
        assert (said, calls[0]) == ("", WAIT)


@EACH
def test_what_cannot_bind_a_call_binds_nothing_where_a_function_is_not_strict(vocabulary: Path, form: Format) -> None:
    """A tool of somebody else's, with one keyword too many, had every request refused that asked for a call."""
    notes = {"title": "A", "description": "b" * 200_000, "examples": ["c"], "x-order": 1, "readOnly": True}
    word = {"type": "string", "minLength": 1, "pattern": "^[a-z]+$"}
    items: dict[str, Any] = {"type": "array", "items": SMALL, "uniqueItems": True}
    properties = {"title": {"type": "boolean"} | notes, "word": word, "at": items}
    schema = {"type": "object", "properties": properties, "required": ["title"], "additionalProperties": False}
    grammar = made(vocabulary, form, schemas={"f": schema})
    assert accepts(vocabulary, grammar, written(form, ("f", {"title": True, "word": "a", "at": [1, 1]})))
    for broken in ({"word": "a"}, {"title": "so"}, {"title": True, "at": [21]}):
        assert not accepts(vocabulary, grammar, written(form, ("f", broken)))


def test_an_answer_that_is_bound_may_be_a_call_instead(vocabulary: Path) -> None:
    """Agents ask for a schema of the last answer and give tools for the turns before it."""
    answer = json_schema({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})
    grammar = made(vocabulary, HERMES, answer=answer)
    assert accepts(vocabulary, grammar, '{"n": 3}')
    assert accepts(vocabulary, grammar, written(HERMES, LOOK))
    assert not accepts(vocabulary, grammar, "No.")


MADE_UP = [
    "{", "{'a", "{}", '{"grammars": []}', '{"grammars": 1}', '{"grammars": ["json_schema"]}', '{"grammars": [{}]}',
    '{"grammars": [{"json_schema": {}}, {"json_schema": {}}]}', '{"grammars": [{"lark_grammar": "start: \\"a\\""}]}',
    '{"a":' * 10_000, '{"grammars": [{"json_schema": ' + "[" * 800 + "]" * 800 + "}]}",
]  # fmt: skip


def test_what_cannot_both_be_is_refused(vocabulary: Path) -> None:
    """A grammar cannot tell a bare call from a bound answer by its first letter. What a client made up that begins as
    JSON does was taken for a schema's, and was the server's fault: a 500."""
    for form, answer, must in (
        (HERMES, json_schema({}), True),
        (HERMES, 'start: "a"', False),
        *((HERMES, made_up, False) for made_up in MADE_UP),
        (LLAMA, json_schema({}), False),
    ):
        with pytest.raises(ApiError, match="bound"):
            made(vocabulary, form, answer=answer, must=must)
