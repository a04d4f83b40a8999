"""Calls of tools in a model's text: however it is cut into pieces, the same is said and the same is called."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpspec.serve.tools import FORMATS, Calling, CallReader, Format, format_of

HERMES, LLAMA, HARMONY = FORMATS
HALF = '{"name": "look", "arguments": {"at": "\\ud800"}}'  # of a pair of surrogates: no UTF-8
NAMES = frozenset({"look", "add"})
LOOK = '{"name": "look", "arguments": {"at": "x } </tool_call> \\" {"}}'
ADD = '{"name": "add", "parameters": {"a": [1, {}], "b": 1.5}}'
Found = tuple[str, list[tuple[str, object]]]
PARTS = ["<tool_call>", "</tool_call>", LOOK, ADD, "<tool", "_call>", " \n", ";", "so ", "{", "}", '"', '{"name": "x"}']


def read(pieces: list[str], form: Format = HERMES, *, parallel: bool = True) -> Found:
    reader = CallReader(Calling(form, NAMES, parallel))
    fed = [reader.feed(piece) for piece in pieces]
    calls = [call for _, calls in fed for call in calls]
    assert [call.index for call in calls] == [*range(len(calls))]
    said = "".join(text for text, _ in fed) + reader.flush()
    return said, [(call.name, json.loads(call.arguments)) for call in calls]


@settings(max_examples=400, deadline=None)
@given(parts=st.lists(st.sampled_from(PARTS), max_size=8), data=st.data(), form=st.sampled_from([HERMES, LLAMA]))
def test_how_a_text_is_cut_changes_nothing(parts: list[str], data: st.DataObject, form: Format) -> None:
    """Marks and braces fall across tokens at every turn; what was let out cannot be taken back."""
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    parallel = data.draw(st.booleans())
    whole = read([text], form, parallel=parallel)
    assert read(pieces, form, parallel=parallel) == read([*text], form, parallel=parallel) == whole
    if form is HERMES and "<tool" not in parts:  # from whose ends a mark may be put together
        assert "<tool_call>" not in whole[0]


@given(text=st.text(st.characters(exclude_characters="<"), max_size=60))
def test_text_without_calls_is_let_through_as_it_is(text: str) -> None:
    assert read([*text]) == read([*text], LLAMA) == (text, [])


LOOKED, ADDED = ("look", {"at": 'x } </tool_call> " {'}), ("add", {"a": [1, {}], "b": 1.5})


@pytest.mark.parametrize(
    ("text", "said", "calls"),
    [
        (f"<tool_call>\n{LOOK}\n</tool_call>", "", [LOOKED]),
        (f"I look.\n<tool_call>\n{LOOK}\n</tool_call>\n<tool_call>{ADD}</tool_call>\n", "I look.", [LOOKED, ADDED]),
        (f"<tool_call>{LOOK}", "", [LOOKED]),  # the mark that closes is often missing at the end
        (f"<tool_call>{LOOK}</tool_call>\n\nDone.", "\n\nDone.", [LOOKED]),
        ('<tool_call>{"name": "rm", "arguments": {}}</tool_call>', '{"name": "rm", "arguments": {}}', []),
        ('<tool_call>{"name": "look", "arguments": [1]}</tool_call>', '{"name": "look", "arguments": [1]}', []),
        ('<tool_call>{"name": ["look"]}</tool_call>', '{"name": ["look"]}', []),
        ('<tool_call>{"name": "look"}</tool_call>', "", [("look", {})]),
        ("<tool_call>__import__('os')</tool_call>", "__import__('os')", []),
        ('<tool_call>{"name": "look", "arguments": {"at": ', '{"name": "look", "arguments": {"at": ', []),
        ('<tool_call>{"name": "look", "arguments": {"at": NaN}}', '{"name": "look", "arguments": {"at": NaN}}', []),
        ('<tool_call>{"name": "look", "arguments": {"at": 1e999}}', '{"name": "look", "arguments": {"at": 1e999}}', []),
        ("<tool_call>" + HALF, HALF, []),
        ('<tool_call>{"name": "look", {</tool_call> <tool_call>', '{"name": "look", { ', []),  # never closed
        (ADD, "", [ADDED]),  # forgotten marks
        (f"</tool_call>{ADD}</tool_call></tool_call>", "", [ADDED]),
        (f"\n{ADD}\n{LOOK}</tool_call> So.", " So.", [ADDED, LOOKED]),
        (f"So {ADD}", f"So {ADD}", []),
        ('{"name": "x"}' + ADD, '{"name": "x"}' + ADD, []),
        (r'<tool_call>{"name": "look", "arguments": {"at": "\\"}}</tool_call> "So"', ' "So"', [("look", {"at": "\\"})]),
        (' {"city": "Rome"} is', ' {"city": "Rome"} is', []),
        ("a < b <tool", "a < b <tool", []),
    ],
)
def test_calls_between_marks(text: str, said: str, calls: list[object]) -> None:
    """A call names a function of the request and has an object for it; what is anything else is text."""
    assert read([text]) == (said, calls)


@pytest.mark.parametrize(
    ("text", "said", "calls"),
    [
        (ADD, "", [ADDED]),
        (f"\n{ADD}; {LOOK}\n", "", [ADDED, LOOKED]),
        (f"{ADD} and so on {LOOK}", f" and so on {LOOK}", [ADDED]),
        (f"So: {ADD}", f"So: {ADD}", []),
        ('\n{"city": "Rome"} is it', '\n{"city": "Rome"} is it', []),
        ('{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
        ('{"name": "add", ', '{"name": "add", ', []),
    ],
)
def test_calls_that_are_bare_json(text: str, said: str, calls: list[object]) -> None:
    """Only at the beginning: JSON amid an answer is an answer."""
    assert read([text], LLAMA) == (said, calls)


def test_only_one_call_where_they_may_not_be_parallel() -> None:
    text = f"One.<tool_call>{LOOK}</tool_call><tool_call>{ADD}</tool_call> More."
    assert read([text], parallel=False) == ("One.", [LOOKED])


def test_a_deep_call_is_text() -> None:
    """json raises RecursionError, which is no ValueError."""
    text = '{"name": "look", "arguments": {"at": ' + "[" * 200_000 + "]" * 200_000 + "}}"
    assert read([f"<tool_call>{text}</tool_call>"]) == (text, [])


def test_the_format_is_read_off_the_template() -> None:
    qwen = r"within <tool_call></tool_call>:\n{\"name\": <function-name>, \"arguments\": <args-json-object>}"
    later = """<tools>{{- '\\n<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}"""
    llama = """{{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name}.' }}"""
    coder = "<tool_call>\n<function=example_function_name>\n<parameter=a> {% for a in tool_call.arguments|items %}"
    templates = (qwen, later, llama, coder, "[TOOL_CALLS]")
    assert [format_of(text) for text in templates] == [HERMES, HERMES, LLAMA, None, None]
