"""Grammars of calls: what they let through is read back as the calls it is, and nothing else is let through."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis.strategies import lists, sampled_from
from tokenizers import AddedToken, Tokenizer

from tpspec.grammar import Vocabulary, json_schema
from tpspec.serve.chats import ChatBody, Message, Tool
from tpspec.serve.errors import ApiError
from tpspec.serve.responses import ResponsesBody
from tpspec.serve.tool_grammar import tool_grammar
from tpspec.serve.tools import FORMATS, Calling, CallReader, Format, Toolbox

HERMES, LLAMA, HARMONY = FORMATS
PLACE = {"type": "object", "properties": {"at": {"$ref": "#/$defs/P"}}, "$defs": {"P": {"enum": ["here", "日本"]}}}
SCHEMAS: dict[str, dict[str, Any]] = {
    "look": PLACE | {"required": ["at"], "additionalProperties": False},
    "wait": {"type": "object", "properties": {}, "additionalProperties": False},
}


def written(form: Format, *calls: str) -> str:
    around = [f"{form.opening}\n{call}\n{form.closing}" if form.opening else call for call in calls]
    return ("\n" if form.opening else "; ").join(around).replace("KEY", form.key)


LOOK, WAIT = '{"name": "look", "KEY": {"at": "日本"}}', '{"name": "wait", "KEY": {}}'
ELSEWHERE = LOOK.replace("日本", "Rome")
CALLS = (LOOK, WAIT, ELSEWHERE)
PIECES = (*CALLS, *(written(HERMES, call) for call in CALLS), *"{ \n;", "No.", "<tool_")


@pytest.fixture(scope="module", params=["letters", "tokens", "special tokens"])
def vocabulary(request: pytest.FixtureRequest, model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the marks are letters like others, tokens of their own (Qwen), or special ones."""
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    if request.param != "letters":
        special = request.param == "special tokens"
        tokenizer.add_tokens([AddedToken(mark, special=special) for mark in (HERMES.opening, HERMES.closing)])
    path = tmp_path_factory.mktemp("vocabulary") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def accepts(path: Path, grammar: str, text: str) -> bool:
    tokenizer, matcher = Tokenizer.from_file(str(path)), Vocabulary(path).matcher(grammar)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def made(path: Path, form: Format, *, answer: str = "", **fields: Any) -> str:
    given = {"shown": [], "schemas": SCHEMAS, "strict": frozenset(), "must": not answer, "parallel": True} | fields
    toolbox = Toolbox(**given)
    has_marks = HERMES.opening in Tokenizer.from_file(str(path)).get_vocab()
    return tool_grammar(toolbox, form, has_marks and bool(form.opening), answer)


@pytest.mark.parametrize("form", [HERMES, LLAMA], ids=lambda form: form.name)
def test_calls_are_let_through_and_read_back(vocabulary: Path, form: Format) -> None:
    grammar = made(vocabulary, form)
    for calls in ([LOOK], [WAIT], [LOOK, WAIT, LOOK] if form.opening else [LOOK]):
        text = written(form, *calls)
        assert accepts(vocabulary, grammar, text)
        said, found = CallReader(Calling(form, frozenset(SCHEMAS))).feed(text)
        assert (said, [call.name for call in found]) == ("", [json.loads(call)["name"] for call in calls])


@pytest.mark.parametrize("form", [HERMES, LLAMA], ids=lambda form: form.name)
def test_nothing_else_is(vocabulary: Path, form: Format) -> None:
    grammar = made(vocabulary, form)
    for text in (
        "No.",
        written(form, ELSEWHERE),
        written(form, WAIT.replace("wait", "rm")),
        written(form, *[WAIT] * 17),
        "No. " + written(form, WAIT),
    ):
        assert not accepts(vocabulary, grammar, text)
    assert not accepts(vocabulary, made(vocabulary, form, parallel=False), written(form, WAIT, WAIT))


@pytest.mark.parametrize("form", [HERMES, LLAMA], ids=lambda form: form.name)
def test_where_nothing_has_to_be_called_a_strict_function_keeps_its_schema(vocabulary: Path, form: Format) -> None:
    """`strict` under tool_choice auto was read and forgotten."""
    grammar = made(vocabulary, form, must=False, strict=frozenset({"look"}))
    loose = WAIT.replace("{}", '{"for": "ever"}')
    for call in (LOOK, WAIT, loose):
        assert accepts(vocabulary, grammar, written(form, call))
    for call in (ELSEWHERE, WAIT.replace("wait", "rm")):
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
        assert not accepts(vocabulary, grammar, written(HERMES, WAIT.replace("{}", '{"for": "ever"}')))


def test_what_is_said_around_calls_is_free_but_no_call_hides_in_it(vocabulary: Path) -> None:
    """A mark that is a token can be spelled by others, which the reader takes for the same."""
    grammar = made(vocabulary, HERMES, must=False, strict=frozenset(SCHEMAS))
    look, elsewhere = written(HERMES, LOOK), written(HERMES, ELSEWHERE)
    assert accepts(vocabulary, grammar, f"So. {look} And {look}\nDone.")
    assert not accepts(vocabulary, grammar, f"So. {look} And {elsewhere}")
    matcher, tokenizer = Vocabulary(vocabulary).matcher(grammar), Tokenizer.from_file(str(vocabulary))
    ids = [id for part in (elsewhere[:5], elsewhere[5:]) for id in tokenizer.encode(part, add_special_tokens=False).ids]
    assert matcher.try_consume_tokens(ids) < len(ids)


@pytest.mark.parametrize("form", [HERMES, LLAMA], ids=lambda form: form.name)
@given(parts=lists(sampled_from(PIECES), max_size=6))
def test_no_call_read_out_of_what_was_let_through_breaks_its_schema(
    vocabulary: Path, form: Format, parts: list[str]
) -> None:
    """Grammar and reader are two programs, and could each have their own idea of where a call begins."""
    text = "".join(parts).replace("KEY", form.key)
    if accepts(vocabulary, made(vocabulary, form, must=False, strict=frozenset(SCHEMAS)), text):
        _, found = CallReader(Calling(form, frozenset(SCHEMAS), lenient=False)).feed(text)
        assert all(json.loads(call.arguments) in ({"at": "here"}, {"at": "日本"}, {}) for call in found)


def test_an_answer_that_is_bound_may_be_a_call_instead(vocabulary: Path) -> None:
    """Agents ask for a schema of the last answer and give tools for the turns before it."""
    answer = json_schema({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})
    grammar = made(vocabulary, HERMES, answer=answer)
    assert accepts(vocabulary, grammar, '{"n": 3}')
    assert accepts(vocabulary, grammar, written(HERMES, LOOK))
    assert not accepts(vocabulary, grammar, "No.")


def test_what_cannot_both_be_is_refused(vocabulary: Path) -> None:
    """A grammar cannot tell a bare call from a bound answer by its first letter."""
    for form, answer, must in (
        (HERMES, json_schema({}), True),
        (HERMES, 'start: "a"', False),
        (LLAMA, json_schema({}), False),
    ):
        with pytest.raises(ApiError, match="bound"):
            made(vocabulary, form, answer=answer, must=must)
