"""Calls of tools in a model's text: however it is cut into pieces, the same is said and the same is called."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from tpspec.serve.arguments import Arguments
from tpspec.serve.call_formats import FORMATS, Format, format_of
from tpspec.serve.tools import Calling, CallReader

FORMS = {form.name: form for form in FORMATS}
HERMES, LLAMA, CODER, GEMMA = (FORMS[name] for name in ("hermes", "llama", "qwen3-coder", "gemma-4"))
HALF = '{"name": "look", "arguments": {"at": "\\ud800"}}'  # of a pair of surrogates: no UTF-8
STRINGS: dict[str, Any] = {"anyOf": [{"$ref": "#/$defs/Word"}, {"type": "null"}]}
LOOKS: dict[str, Any] = {
    "type": "object",
    "properties": {"at": {"type": "string"}, "far": {"type": "boolean"}, "or": STRINGS},
    "$defs": {"Word": {"type": "string"}},
}
PUTS = {"properties": {"these": {"type": "array"}}}
FUNCTIONS = {"look": Arguments(LOOKS), "add": Arguments({"type": "object"}), "put": Arguments(PUTS)}
TAGS = r'["</arg_value></tool_call>", "a\"</parameter><function=look></function>", "<tool_call>look</tool_call>"]'
PUT = ("put", {"these": json.loads(TAGS)})
LOOK = '{"name": "look", "arguments": {"at": "x } </tool_call> \\" {"}}'
ADD = '{"name": "add", "parameters": {"a": [1, {}], "b": 1.5}}'
Found = tuple[str, list[tuple[str, object]]]
PARTS = [
    "<tool_call>",
    "</tool_call>",
    LOOK,
    ADD,
    "<tool",
    "_call>",
    " \n",
    ";",
    "\u3000",
    "so ",
    "{",
    "}",
    '"',
    '{"name": "x"}',
]
CODED = (
    "<function=look>\n<parameter=at>\na </tool_call> b\n</parameter>\n<parameter=far>\nTrue\n</parameter>\n</function>"
)
LISTED = (
    "look\n<arg_key>at</arg_key>\n<arg_value>7 < 8</arg_value>\n<arg_key>or</arg_key>\n<arg_value>null</arg_value>\n"
)
INVOKED = (
    '<invoke name="look">\n<parameter name="at">a </tool_call> b</parameter>\n<parameter name="far">True</parameter>\n'
    "</invoke>"
)
PIECES = {
    "qwen3-coder": [
        CODED,
        "<function=add>",
        "</function>",
        "<parameter=a>",
        "</parameter>",
        "<function=add></function>",
        f"<function=put><parameter=these>{TAGS}",
    ],
    "minimax-m2": [
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        INVOKED,
        '<invoke name="add">',
        "</invoke>",
        '<parameter name="a">',
        "</parameter>",
        '<invoke name="',
        "<minimax",
    ],
    "seed": ["<seed:tool_call>", "</seed:tool_call>", CODED, "<function=", "</function>", "<seed", "<parameter=a>"],
    "glm-4.5": [
        LISTED,
        LISTED.replace("\n", ""),
        "look",
        "add",
        "<arg_key>a</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "put<arg_key>these</arg_key>",
        TAGS,
    ],
    "gemma-4": [
        "<|tool_call>",
        "<tool_call|>",
        "call:look",
        "call:add{",
        'at:<|"|>x } <tool_call|> " {',
        '<|"|>',
        "a:[1,{}],",
        '"b": "q\\"}"',
        "<|",
    ],
    "mistral": ["[TOOL_CALLS]", "look[ARGS]", "add", '{"a": 1}', "[CALL_ID]a1b2", "[ARGS]", "[TOOL"],
    "mistral-list": ["[TOOL_CALLS]", f"[{LOOK}, {ADD}]", "[", "]", LOOK, ", ", "[TOOL", "_CALLS]"],
}
CALLS = {
    "hermes": f"<tool_call>{LOOK}</tool_call>",
    "llama": LOOK,
    "qwen3-coder": "<function=add></function>",
    "minimax-m2": '<minimax:tool_call><invoke name="add"></invoke></minimax:tool_call>',
    "seed": "<seed:tool_call><function=add></function></seed:tool_call>",
    "glm-4.5": "<tool_call>add</tool_call>",
    "glm-4.7": "<tool_call>add</tool_call>",
    "gemma-4": "<|tool_call>call:add{}<tool_call|>",
    "functiongemma": "<start_function_call>call:add{}<end_function_call>",
    "mistral": "[TOOL_CALLS]add{}",
    "mistral-list": f"[TOOL_CALLS][{LOOK}]",
}


def read(
    pieces: list[str], form: Format = HERMES, *, parallel: bool = True, lenient: bool = True, must: bool = False
) -> Found:
    reader = CallReader(Calling(form, FUNCTIONS, parallel, lenient, must))
    fed = [reader.feed(piece) for piece in pieces]
    calls = [call for _, calls in fed for call in calls]
    assert [call.index for call in calls] == [*range(len(calls))]
    said = "".join(text for text, _ in fed) + reader.flush()
    return said, [(call.name, json.loads(call.arguments)) for call in calls]


@settings(max_examples=400, deadline=None)
@given(data=st.data(), form=st.sampled_from([form for form in FORMATS if not form.is_addressed]))
def test_how_a_text_is_cut_changes_nothing(data: st.DataObject, form: Format) -> None:
    """Marks and braces fall across tokens at every turn; what was let out cannot be taken back."""
    parts = data.draw(st.lists(st.sampled_from(PARTS + PIECES.get(form.name, [])), max_size=8))
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    parallel = data.draw(st.booleans())
    whole = read([text], form, parallel=parallel)
    assert read(pieces, form, parallel=parallel) == read([*text], form, parallel=parallel) == whole
    if form is HERMES and "<tool" not in parts:  # from whose ends a mark may be put together
        assert "<tool_call>" not in whole[0]


@settings(max_examples=300, deadline=None)
@given(data=st.data(), form=st.sampled_from([FORMS[name] for name in CALLS]))
def test_how_a_text_behind_a_call_is_cut_changes_nothing(data: st.DataObject, form: Format) -> None:
    """Where a bare call and a mark begin alike, the first letter of one that came alone let out what stood before it,
    and the call became text."""
    call, marks = CALLS[form.name], (form.opening, form.closing)
    parts = [call, call.removeprefix(form.opening), *marks, *(mark[:4] for mark in marks), *";\n[{]x", "\u3000"]
    text = call + "".join(data.draw(st.lists(st.sampled_from(parts), max_size=5)))
    cut = data.draw(st.integers(0, len(text)))
    assert read([*text], form) == read([text[:cut], text[cut:]], form) == read([text], form)


@given(text=st.text(st.characters(exclude_characters="<["), max_size=60))
def test_text_without_calls_is_let_through_as_it_is(text: str) -> None:
    assert all(read([*text], form) == (text, []) for form in FORMATS)


QUOTED = f'{{"name": "look", "arguments": {{"at": "as "so" <tool_call>{ADD}</tool_call>"}}}}'
LOOKED, ADDED = ("look", {"at": 'x } </tool_call> " {'}), ("add", {"a": [1, {}], "b": 1.5})
CODED_CALL = ("look", {"at": "a </tool_call> b", "far": True})
LISTED_CALL, ADD_0 = ("look", {"at": "7 < 8", "or": None}), ("add", {})
ODD = ("add", {"a": None, "b": {"c": ["NaN", "1e999", "it's so"]}})
LOOKS_AT = '<|tool_call>call:look{at:<|"|>x } </tool_call> " {<|"|>}<tool_call|>'
ADDS = "<|tool_call>call:add{a:[1,{}],b:1.5}<tool_call|>"
TWO_KEYS = '<|"|>a<|"|>,<|"|>b<|"|>:1'
OTHERS = "\n<function=write>\n<parameter=a>\n<function=add></function>\n</parameter>\n</function>"
ADD_1 = "<function=add><parameter=a>1</parameter>"
SAID = "<function=look><parameter=at>\n x</parameter><parameter=or>y</parameter>"


@pytest.mark.parametrize(
    ("text", "said", "calls"),
    [
        (f"<tool_call>\n{LOOK}\n</tool_call>", "", [LOOKED]),
        (f"I look.\n<tool_call>\n{LOOK}\n</tool_call>\n<tool_call>{ADD}</tool_call>\n", "I look.", [LOOKED, ADDED]),
        (f"<tool_call>{LOOK}", "", [LOOKED]),  # the mark that closes is often missing at the end
        (f"<tool_call>{LOOK}</tool_call>\n\nDone.", "\n\nDone.", [LOOKED]),
        (f"<tool_call>{LOOK}</tool_call>\n;{{1}} So.", "\n;{1} So.", [LOOKED]),  # a call would be told apart by those
        (f"<tool_call>{LOOK}</tool_call>\u3000{ADD}", f"\u3000{ADD}", [LOOKED]),  # and not by this
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
        (f'<tool_call>{{"a": {{"b": 1}}</tool_call><tool_call>{ADD}</tool_call>', '{"a": {"b": 1}', [ADDED]),  # a brace
        (f"<tool_call>{QUOTED}</tool_call>", re.sub("</?tool_call>", "", QUOTED), []),  # quotes that were not escaped
    ],
)
def test_calls_between_marks(text: str, said: str, calls: list[object]) -> None:
    """A call names a function of the request and has an object for it; what is anything else is text."""
    assert read([text]) == read([*text]) == (said, calls)


@pytest.mark.parametrize(
    ("text", "said", "calls"),
    [
        (ADD, "", [ADDED]),
        (f"\n{ADD}; {LOOK}\n", "", [ADDED, LOOKED]),
        (f"{ADD}; {{1}} So.", "; {1} So.", [ADDED]),
        (f"{ADD}; {{1", "; {1", [ADDED]),
        (f"{ADD} and so on {LOOK}", f" and so on {LOOK}", [ADDED]),
        (f"So: {ADD}", f"So: {ADD}", []),
        ('\n{"city": "Rome"} is it', '\n{"city": "Rome"} is it', []),
        ('{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
        ('{"name": "add", ', '{"name": "add", ', []),
    ],
)
def test_calls_that_are_bare_json(text: str, said: str, calls: list[object]) -> None:
    """Only at the beginning: JSON amid an answer is an answer."""
    assert read([text], LLAMA) == read([*text], LLAMA) == (said, calls)


@pytest.mark.parametrize(
    ("form", "text", "said", "calls"),
    [
        (CODER, f"So.\n<tool_call>\n{CODED}\n</tool_call>", "So.", [CODED_CALL]),
        (CODER, f"{CODED}\n</tool_call>\n{CODED}", "", [CODED_CALL, CODED_CALL]),  # forgotten marks
        (CODER, "<tool_call>\n<function=add>\n</function>\n</tool_call>", "", [("add", {})]),
        (CODER, "<tool_call><function=add><parameter=a>1</parameter></tool_call>", "", [("add", {"a": 1})]),
        (CODER, "<tool_call>\n<function=rm>\n</function>\n</tool_call> No.", "\n<function=rm>\n</function> No.", []),
        (CODER, "<tool_call>\n<function=add>\n<parameter=a>\n1", "\n<function=add>\n<parameter=a>\n1", []),
        (CODER, f"<tool_call>{ADD}</tool_call> So.", f"{ADD} So.", []),  # Hermes'
        (CODER, "<function=add>\n<parameter=a>\nNaN\n</parameter>\n</function>", "", [("add", {"a": "NaN"})]),
        (CODER, f"<tool_call>{OTHERS}\n</tool_call>", OTHERS, []),  # what is quoted to a function is not called
        (
            CODER,
            f"<tool_call>{OTHERS.replace('write', 'fs:write')}\n</tool_call>",
            OTHERS.replace("write", "fs:write"),
            [],
        ),
        (CODER, OTHERS, OTHERS, []),
        (CODER, f"Use <function=add> and {CODED}", "Use <function=add> and", [CODED_CALL]),
        (CODER, f"<function=add> {CODED}", "<function=add>", [CODED_CALL]),
        (CODER, f"<tool_call><function=add><parameter=a>1</parameter> So. {CODED}", f"{ADD_1} So.", [CODED_CALL]),
        (CODER, f"A <tool_call> holds <function=look>. {CODED}", "A  holds <function=look>.", [CODED_CALL]),
        (CODER, f"Use  <function=rm>, or {CODED}", "Use  <function=rm>, or", [CODED_CALL]),  # nothing waits for its end
        (CODER, "Or <function=a b>, \n<function=", "Or <function=a b>, \n<function=", []),
        (CODER, "So. \n<tool_call>x", "So. \nx", []),
        (CODER, f"<function=put>\n<parameter=these>\n{TAGS}\n</parameter>\n</function>", "", [PUT]),  # in a string
        (
            FORMS["glm-4.7"],
            f"<tool_call>put<arg_key>these</arg_key><arg_value>{TAGS}</arg_value></tool_call>",
            "",
            [PUT],
        ),
        (CODER, '<function=put>\n<parameter=these>\n["a\n</parameter>\n</function>', "", [("put", {"these": '["a'})]),
        (
            FORMS["minimax-m2"],
            f'So.\n<minimax:tool_call>\n{INVOKED}\n<invoke name="add">\n</invoke>\n</minimax:tool_call>',
            "So.",
            [CODED_CALL, ADD_0],
        ),
        (FORMS["glm-4.5"], "The <tool_call> in a text.", "The  in a text.", []),
        (
            FORMS["seed"],
            f"<seed:tool_call>{SAID}</function></seed:tool_call>",
            "",
            [("look", {"at": "\n x", "or": "y"})],
        ),
        (
            FORMS["glm-4.5"],
            f"\n<tool_call>{LISTED}</tool_call>\n<tool_call>add\n</tool_call>",
            "",
            [LISTED_CALL, ADD_0],
        ),
        (FORMS["glm-4.5"], f"<tool_call>{LISTED}", LISTED, []),  # nothing but its mark ends it
        (FORMS["glm-4.7"], f"<tool_call>{LISTED}</tool_call><tool_call>add</tool_call>", "", [LISTED_CALL, ADD_0]),
        (FORMS["glm-4.7"], "The mark `<tool_call>` opens.", "The mark `` opens.", []),
        (FORMS["glm-4.7"], "<tool_call>add<arg_value>1</arg_value></tool_call>", "add<arg_value>1</arg_value>", []),
        (GEMMA, f"So.{LOOKS_AT}{ADDS}\n", "So.", [LOOKED, ("add", {"a": [1, {}], "b": 1.5})]),
        (GEMMA, "<|tool_call>call:add{}", "", [ADD_0]),
        (
            GEMMA,
            '<|tool_call>call:add{"a": "} \\" \n", b c :x}<tool_call|>',
            "",
            [("add", {"a": '} " \n', "b c": "x"})],
        ),
        (GEMMA, "<|tool_call>call:add{a:None,b:{c:[NaN,1e999,it's so]}}<tool_call|>", "", [ODD]),
        (
            GEMMA,
            '<|tool_call>call:look{at:12,far:<|"|>x<|"|>or:null}',
            "",
            [("look", {"at": "12", "far": "x", "or": None})],
        ),
        (GEMMA, '<|tool_call>call:add{a:[<|"|>x<|"|><|"|>y<|"|>,],}', "", [("add", {"a": ["x", "y"]})]),
        (GEMMA, '<|tool_call>call:add{price>:1,a<b:2,say "x":3}', "", [("add", {"price>": 1, "a<b": 2, 'say "x"': 3})]),
        (GEMMA, '<|tool_call>call:rm{a:<|"|>x<|"|>}<tool_call|> No.', 'call:rm{a:<|"|>x<|"|>} No.', []),
        (GEMMA, '<|tool_call>call:add{a:<|"|>x}<tool_call|>', 'call:add{a:<|"|>x}', []),  # never closed
        (GEMMA, f"<|tool_call>call:add{{a:{{b:1}}<tool_call|>{ADDS}", "call:add{a:{b:1}", [ADDED]),  # a brace
        (GEMMA, "<|tool_call>call:add{a:b{c}}<tool_call|>", "call:add{a:b{c}}", []),
        (GEMMA, "<|tool_call>call:add{a,b}<tool_call|>", "call:add{a,b}", []),
        (GEMMA, f"<|tool_call>call:add{{{TWO_KEYS}}}<tool_call|>", f"call:add{{{TWO_KEYS}}}", []),
        (GEMMA, "<|tool_call>call:add{a:" + "[" * 9999 + "}", "call:add{a:" + "[" * 9999 + "}", []),
        (GEMMA, "<|tool_call>add(a=1)<tool_call|> So.", "add(a=1) So.", []),
        (
            FORMS["functiongemma"],
            "<start_function_call>call:look{at:<escape>x<escape>,far:True}<end_function_call>",
            "",
            [("look", {"at": "x", "far": True})],
        ),
        (FORMS["mistral"], 'Hm.[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add{}', "Hm.", [("add", {"a": 1}), ADD_0]),
        (FORMS["mistral"], "[TOOL_CALLS]add[CALL_ID]a1b2c3d4e[ARGS]{}", "", [ADD_0]),
        (FORMS["mistral"], "[TOOL_CALLS]rm[ARGS]{} No.", "rm[ARGS]{} No.", []),
        (FORMS["mistral"], '[TOOL_CALLS]add[ARGS]{"a": [1[TOOL_CALLS]add{}', 'add[ARGS]{"a": [1', [ADD_0]),
        (FORMS["mistral"], "A [TOOL_CALLS] opens [TOOL_CALLS]add{}", "A  opens", [ADD_0]),
        (FORMS["mistral-list"], f"[TOOL_CALLS][{ADD}[TOOL_CALLS][{ADD}]", f"[{ADD}", [ADDED]),
        (FORMS["mistral"], "[TOOL_CALLS]" + "so " * 99, "so " * 99, []),  # nothing is held for ever
        (FORMS["mistral-list"], f"[TOOL_CALLS] [{LOOK}, {ADD}] So.", " So.", [LOOKED, ADDED]),
        (FORMS["mistral-list"], f"[TOOL_CALLS][{LOOK}, 1]", f"[{LOOK}, 1]", []),
        (FORMS["mistral-list"], f"[{ADD}]", "", [ADDED]),  # forgotten mark
        (FORMS["mistral-list"], f"[TOOL_CALLS][{ADD}];\n[{ADD}];\n[1]", ";\n[1]", [ADDED, ADDED]),
        (FORMS["mistral-list"], "[1] is a list", "[1] is a list", []),
    ],
    ids=lambda value: value.name if isinstance(value, Format) else None,
)
def test_calls_in_the_way_of_each_model(form: Format, text: str, said: str, calls: list[object]) -> None:
    """Arguments between tags are text, of which the schema says what it stands for."""
    assert read([text], form) == read([*text], form) == (said, calls)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (CODER, "<function=rm>"),
        (CODER, "<function=add>"),
        (CODER, "<function=a b"),
        (CODER, "<function=add\n\n)"),
        (CODER, "<tool_call>\n<function=a b"),
        (CODER, f"<function={'a' * 300}"),
        (CODER, f"<function=add><parameter={'a' * 300}"),
        (CODER, "<function=add><parameter=a>1</parameter>"),
        (FORMS["glm-4.5"], "<tool_call>add" + "\n" * 300),
        (FORMS["mistral"], f"[TOOL_CALLS]{'so ' * 99}"),
        (GEMMA, f"<|tool_call>call{' so' * 99}"),
        (GEMMA, "<|tool_call>call:add{a<tool_call|>"),
        (HERMES, "<tool_call>{</tool_call>"),
    ],
    ids=lambda value: value.name if isinstance(value, Format) else None,
)
def test_what_is_no_call_waits_for_nothing(form: Format, text: str) -> None:
    """A tag that an answer spoke of held back the rest of it, and took calls that came later for its arguments."""
    reader = CallReader(Calling(form, FUNCTIONS))
    said = "".join(reader.feed(char)[0] for char in f"Or {text} so")
    assert said == re.sub(f"{re.escape(form.opening)}|{re.escape(form.closing) or '$'}", "", f"Or {text} so")


def test_where_all_is_bound_a_call_has_its_marks() -> None:
    """A grammar lets anything be said outside of them, so that what it lets through must not be read as a call."""
    bare = "<function=add></function>"
    assert (read([bare], CODER), read([bare], CODER, lenient=False)) == (("", [ADD_0]), (bare, []))
    assert read([f"[{ADD}]"], FORMS["mistral-list"], lenient=False) == (f"[{ADD}]", [])


@pytest.mark.parametrize("form", [HERMES, CODER], ids=["hermes", "qwen3-coder"])
def test_a_mark_that_is_cut_short_is_no_text(form: Format) -> None:
    """As by max_tokens. Behind a call, and where one has to be; else it may be what somebody wanted to say."""
    call = ADD if form is HERMES else "<function=add></function>"
    begun, whole = f"{form.opening}\n{call}", f"{form.opening}\n{call}\n{form.closing}\n{form.opening}"
    for size in range(len(begun), len(whole) + 1):
        said, calls = read([whole[:size]], form)
        assert (said, len(calls)) == ("", 1), whole[:size]
    for size in range(1, len(form.opening) + 2):
        begun = f"{form.opening}\n"[:size]
        assert read([begun], form, lenient=False, must=True) == ("", [])
        if begun in form.opening[:-1]:
            assert read([begun], form, lenient=False) == read([begun], form) == (begun, [])
            assert read([f"One {begun}"], form, must=True) == (f"One {begun}", [])


def test_ids_are_as_templates_take_them() -> None:
    """Mistral's raise where an id is not of nine letters and digits."""
    reader = CallReader(Calling(FORMS["mistral"], FUNCTIONS))
    _, calls = reader.feed("[TOOL_CALLS]add{}[TOOL_CALLS]add{}")
    assert len({call.id for call in calls}) == 2
    assert all(re.fullmatch("[a-zA-Z0-9]{9}", call.id) for call in calls)


def test_only_one_call_where_they_may_not_be_parallel() -> None:
    text = f"One.<tool_call>{LOOK}</tool_call><tool_call>{ADD}</tool_call> More."
    assert read([text], parallel=False) == ("One.", [LOOKED])


@pytest.mark.parametrize("depth", [40, 700, 200_000])
def test_a_deep_value_is_text_and_a_call_that_holds_it_too(depth: int) -> None:
    """json raises RecursionError, which is no ValueError; and one of 40 levels could not be sent back to the server."""
    deep = "[" * depth + "]" * depth
    text = f'{{"name": "look", "arguments": {{"at": {deep}}}}}'
    assert read([f"<tool_call>{text}</tool_call>"]) == (text, [])
    coded = f"<function=add><parameter=a>{deep}</parameter></function>"
    assert read([coded], CODER) == ("", [("add", {"a": deep})])


@pytest.mark.parametrize(
    ("form", "piece", "begin"),
    [
        (HERMES, "\n", "So."),
        (CODER, "\n", "So."),
        (CODER, "\n", "<tool_call>"),
        (CODER, "\n", "<tool_call><function=add>"),
        (CODER, "a", "<tool_call><function=add><parameter=a>"),
        (CODER, "<", "<tool_call><function=add><parameter=a>"),
        (CODER, "<parameter=", "<tool_call><function=add>"),
        (CODER, "<function=rm>", ""),
        (FORMS["glm-4.5"], "\n", "<tool_call>add"),
        (GEMMA, " ", "<|tool_call>call:add{a:"),
        (GEMMA, "a", '<|tool_call>call:add{a:<|"|>'),
        (GEMMA, "\\", '<|tool_call>call:add{a:"'),
        (GEMMA, "[", "<|tool_call>call:add{a:"),
        (GEMMA, " ", "<|tool_call>call:add{a"),
        (FORMS["mistral"], "\n", "[TOOL_CALLS]add[CALL_ID]"),
        (LLAMA, "\n", '{"name": "add", "parameters": '),
    ],
    ids=lambda value: value.name if isinstance(value, Format) else None,
)
def test_a_long_answer_is_read_once(form: Format, piece: str, begin: str) -> None:
    """Blanks that were tried against two patterns in each of their splits held the event loop for minutes,
    of three times as many."""
    started = time.monotonic()
    said, calls = read([begin, *[piece] * 20_000, "x", *form.form.marks, *form.marks], form)
    assert calls == []
    assert "x" in said
    assert time.monotonic() - started < 6


def test_the_format_is_read_off_the_template() -> None:
    """Excerpts of published templates. DeepSeek's is none of ours, and is not to pass for another."""
    templates = {
        r"within <tool_call></tool_call>:\n{\"name\": <function-name>, \"arguments\": <args-json-object>}": "hermes",
        """<tools>{{- '\\n<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}""": "hermes",
        """{{- 'Respond in the format {"name": function name, "parameters": dictionary}.' }}""": "llama",
        "<tool_call>\n<function=example_function_name>\n<parameter=a> {% for a in arguments|items %}": "qwen3-coder",
        "toolcall_begin_token = '<minimax:tool_call>' {{ '\n<invoke name=\"' + tool_call.name + '\">'": "minimax-m2",
        "toolcall_begin_token = '<seed:tool_call>' {{ '\\n<function=' + tool_call.name }} <parameter=": "seed",
        "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>": "glm-4.5",
        "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value>": "glm-4.7",
        """{{- '[TOOL_CALLS]' + tool['function']['name'] + '[ARGS]' + arguments }}""": "mistral",
        """{{- "[TOOL_CALLS] [" }}{%- set out = tool_call.function|tojson %}""": "mistral-list",
        """'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>'""": None,
        "{{- '<|tool_call>call:' + function['name'] + '{' -}}": "gemma-4",
        "{{-  '<start_function_call>call:' + tool_call['name'] + '{' -}}": "functiongemma",
    }
    found = {text: format_of(text) for text in templates}
    assert {text: form and form.name for text, form in found.items()} == templates


def test_calls_between_two_marks_are_calls_where_marks_have_to_be_there() -> None:
    """As where a grammar binds them. Stands against all but the first taken for text, as what comes behind marks is."""
    inner = '<invoke name="add">\n</invoke>'
    bound = f"<minimax:tool_call>\n{inner}\n{inner}\n</minimax:tool_call>\n"
    assert read([*bound], FORMS["minimax-m2"], lenient=False) == ("", [ADD_0, ADD_0])
    assert read([*bound, *inner], FORMS["minimax-m2"], lenient=False) == (f"\n{inner}", [ADD_0, ADD_0])
