"""Grammars of calls: what they let through is read back as the calls it is, and nothing else is let through."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from tpspec.grammar import Vocabulary, json_schema
from tpspec.serve.errors import ApiError
from tpspec.serve.tool_grammar import tool_grammar
from tpspec.serve.tools import FORMATS, Calling, CallReader, Format, Toolbox

HERMES, LLAMA = FORMATS
PLACE = {"type": "object", "properties": {"at": {"$ref": "#/$defs/P"}}, "$defs": {"P": {"enum": ["here", "日本"]}}}
SCHEMAS: dict[str, dict[str, Any]] = {
    "look": PLACE | {"required": ["at"], "additionalProperties": False},
    "wait": {"type": "object", "properties": {}, "additionalProperties": False},
}
LOOK, WAIT = '{"name": "look", "KEY": {"at": "日本"}}', '{"name": "wait", "KEY": {}}'


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


def written(form: Format, *calls: str) -> str:
    around = [f"{form.opening}\n{call}\n{form.closing}" if form.opening else call for call in calls]
    return ("\n" if form.opening else "; ").join(around).replace("KEY", form.key)


def made(path: Path, form: Format, *, answer: str = "", **fields: Any) -> str:
    toolbox = Toolbox(**({"shown": [], "schemas": SCHEMAS, "must": not answer, "parallel": True} | fields))
    has_marks = HERMES.opening in Tokenizer.from_file(str(path)).get_vocab()
    return tool_grammar(toolbox, form, has_marks and bool(form.opening), answer)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_calls_are_let_through_and_read_back(vocabulary: Path, form: Format) -> None:
    grammar = made(vocabulary, form)
    for calls in ([LOOK], [WAIT], [LOOK, WAIT, LOOK] if form.opening else [LOOK]):
        text = written(form, *calls)
        assert accepts(vocabulary, grammar, text)
        said, found = CallReader(Calling(form, frozenset(SCHEMAS))).feed(text)
        assert (said, [call.name for call in found]) == ("", [json.loads(call)["name"] for call in calls])


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_nothing_else_is(vocabulary: Path, form: Format) -> None:
    grammar = made(vocabulary, form)
    elsewhere, unknown = LOOK.replace("日本", "Rome"), WAIT.replace("wait", "rm")
    for text in (
        "No.",
        written(form, elsewhere),
        written(form, unknown),
        written(form, *[WAIT] * 17),
        "No. " + written(form, WAIT),
    ):
        assert not accepts(vocabulary, grammar, text)
    assert not accepts(vocabulary, made(vocabulary, form, parallel=False), written(form, WAIT, WAIT))


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
