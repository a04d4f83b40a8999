"""Grammars of calls: what they let through is read back as the calls it is, and nothing else is let through."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis.strategies import DataObject, SearchStrategy, builds, data, lists, sampled_from
from tokenizers import AddedToken, Tokenizer

from tpspec.errors import UserError
from tpspec.grammar import Vocabulary, json_schema
from tpspec.serve.arguments import Arguments
from tpspec.serve.call_formats import FORMATS, Format
from tpspec.serve.chats import ChatBody, Message, Tool
from tpspec.serve.errors import ApiError
from tpspec.serve.responses import ResponsesBody
from tpspec.serve.tool_grammar import tool_grammar
from tpspec.serve.tools import Calling, CallReader, Toolbox

FORMS = {form.name: form for form in FORMATS if not form.is_addressed}
HERMES, LLAMA = FORMS["hermes"], FORMS["llama"]
PLACE = {"type": "object", "properties": {"at": {"$ref": "#/$defs/P"}}, "$defs": {"P": {"enum": ["here", "日本"]}}}
WORDS = {
    "word": {"type": "string", "description": "as it is said"},
    "far": {"type": "boolean"},
    "to": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "at": {"type": "array", "items": {"type": "integer"}},
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "look": PLACE | {"required": ["at"], "additionalProperties": False},
    "wait": {"type": "object", "properties": {}, "additionalProperties": False},
    "tell": {"type": "object", "properties": WORDS, "required": ["word", "far"], "additionalProperties": False},
}
FUNCTIONS = {name: Arguments(schema) for name, schema in SCHEMAS.items()}
Call = tuple[str, dict[str, Any]]
LOOK, WAIT, ELSEWHERE = ("look", {"at": "日本"}), ("wait", {}), ("look", {"at": "Rome"})
TELL: Call = ("tell", {"word": 'a\n< "b" 3', "far": True, "to": None, "at": [1, 2]})
LOOSE: Call = ("wait", {"for": "ever"})


def text_of(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def in_words(value: Any) -> str:
    return value if isinstance(value, str) else text_of(value)


def written(form: Format, *calls: Call) -> str:
    """As its chat template writes calls of earlier turns."""
    match form.name:
        case "hermes" | "llama":
            keys = {"hermes": "arguments", "llama": "parameters"}
            texts = [text_of({"name": name, keys[form.name]: arguments}) for name, arguments in calls]
            if form is LLAMA:
                return "; ".join(texts)
        case "mistral-list":
            return "[TOOL_CALLS] " + text_of([{"name": name, "arguments": arguments} for name, arguments in calls])
        case "mistral":
            return "".join(f"[TOOL_CALLS]{name}[ARGS]{text_of(arguments)}" for name, arguments in calls)
        case "qwen3-coder" | "seed":
            pad = "\n" if form.name == "qwen3-coder" else ""
            texts = [
                f"<function={name}>\n"
                + "".join(f"<parameter={k}>{pad}{in_words(v)}{pad}</parameter>\n" for k, v in arguments.items())
                + "</function>"
                for name, arguments in calls
            ]
        case _:
            gap = "\n" if form.name == "glm-4.5" else ""
            pair = f"<arg_key>{{}}</arg_key>{gap}<arg_value>{{}}</arg_value>{gap}"
            texts = [
                name + gap + "".join(pair.format(k, in_words(v)) for k, v in arguments.items())
                for name, arguments in calls
            ]
            return gap.join(f"{form.opening}{text}{form.closing}" for text in texts)
    return "\n".join(f"{form.opening}\n{text}\n{form.closing}" for text in texts)


def add_marks(tokenizer: Tokenizer, forms: Iterable[Format], *, special: bool) -> None:
    letters = ("<function=", "</function>", "<parameter=", "</parameter>", ">")  # in every vocabulary
    marks = {mark: None for form in forms for mark in form.marks if mark not in letters}
    tokenizer.add_tokens([AddedToken(mark, special=special) for mark in marks])


@pytest.fixture(scope="module", params=["letters", "tokens", "special tokens"])
def vocabulary(request: pytest.FixtureRequest, model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the marks are letters like others, tokens of their own (Qwen, GLM), or special ones (Mistral)."""
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    if request.param != "letters":
        add_marks(tokenizer, FORMS.values(), special=request.param == "special tokens")
    path = tmp_path_factory.mktemp("vocabulary") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@cache
def loaded(path: Path) -> tuple[Tokenizer, Vocabulary]:
    return Tokenizer.from_file(str(path)), Vocabulary(path)


def accepts(path: Path, grammar: str, text: str) -> bool:
    tokenizer, vocabulary = loaded(path)
    matcher = vocabulary.matcher(grammar)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def made(path: Path, form: Format, *, answer: str = "", **fields: Any) -> str:
    given = {"shown": [], "schemas": SCHEMAS, "strict": frozenset(), "must": not answer, "parallel": True} | fields
    added = {token.content: id for id, token in loaded(path)[0].get_added_tokens_decoder().items()}
    return tool_grammar(Toolbox(**given), form, added, answer)


def read(form: Format, text: str, *, lenient: bool = True) -> tuple[str, list[Call]]:
    reader = CallReader(Calling(form, FUNCTIONS, lenient=lenient))
    said, found = reader.feed(text)
    return said + reader.flush(), [(call.name, json.loads(call.arguments)) for call in found]


EACH = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


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
@settings(max_examples=60, deadline=None)
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


CODER, GLM = FORMS["qwen3-coder"], FORMS["glm-4.7"]
SMALL: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": 20}
PAIR: dict[str, Any] = {"type": "object", "properties": {"b": SMALL}, "required": ["b"], "additionalProperties": False}
ROWS = {"type": "array", "items": {"$ref": "#/$defs/Pair"}}
SIMPLE: list[Any] = [
    *({"type": kind} for kind in ("string", "integer", "number", "boolean", "null", "array", "object")),
    {"type": ["string", "integer", "null"]},
    {"enum": ["1", "a b", "", "True", "\n"]},
    {"enum": [1, None, True, [1], {"b": 2}, 1.5]},
    {"type": "integer", "enum": ["1", 2, 3.0]},
    {"const": True},
    {"$ref": "#/$defs/Small"},
    {"$ref": "#/$defs/Pair"},
    {"$ref": "#/$defs/Tree"},
    {"$ref": "#/properties/c"},
    {"type": ["string", "number"], "minimum": 5},
    {"type": ["boolean", "array"], "items": SMALL},
    {"type": "array", "items": {"type": "string"}},
    SMALL, PAIR, ROWS, {}, True,
]  # fmt: skip
DEFINITIONS: dict[str, Any] = {
    "Small": SMALL,
    "Pair": PAIR,
    "Tree": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#/$defs/Tree"}}]},
}
VALUES = [
    "", "a", "a b", "1", "3", "3.0", "-7", "20", "21", "1.5", "1e2", "true", "True", "false", "null", "None", "NaN",
    "[]", "[1]", '["a"]', '[{"b": 2}]', '[{"b": 22}]', "[[], null]", "[[1]]", "{}", '{"b": 2}', '{"b": "x"}',
    "{'b': 2}", " 1", "\t{", "\n", '"a"', "(1)", "<", "a\n</x", "-", "+1", "\u00a01", "٣", "[", "tru",
]  # fmt: skip
CLOSED = [
    *('["a"', ' ["a</parameter>"]', '\u00a0["</parameter>', '\n{"</arg_value>'),
    '["</parameter>"]',
    '["</arg_value>"]',
    '{"a": "</parameter></arg_value>"}',
]


def unions() -> SearchStrategy[Any]:
    some = lists(sampled_from(SIMPLE), min_size=1, max_size=3)
    return sampled_from(SIMPLE) | builds(
        lambda key, inner: {key: inner}, sampled_from(["anyOf", "oneOf", "allOf"]), some
    )


def one_argument(schema: Any) -> dict[str, Any]:
    properties = {"a": schema, "c": {"type": "boolean"}}
    return {"properties": properties, "required": ["a"], "additionalProperties": False, "$defs": DEFINITIONS}


def raw(form: Format, text: str) -> str:
    if form is GLM:
        return f"<tool_call>f<arg_key>a</arg_key><arg_value>{text}</arg_value></tool_call>"
    return f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>"


@settings(max_examples=120, deadline=None)
@given(schema=unions(), form=sampled_from([CODER, GLM]))
def test_what_a_schema_lets_through_is_read_as_what_it_allows(vocabulary: Path, schema: Any, form: Format) -> None:
    """The grammar of a string beside a number said nothing of the number, which the reader then took the string for."""
    whole = one_argument(schema)
    try:
        grammar = made(vocabulary, form, schemas={"f": whole}, strict=frozenset({"f"}))
        accepts(vocabulary, grammar, "")
    except (ApiError, UserError):  # refused by name
        return
    reader = CallReader(Calling(form, {"f": Arguments(whole)}))
    for value in VALUES + CLOSED:
        if accepts(vocabulary, grammar, raw(form, value)):
            _, (call,) = reader.feed(raw(form, value))
            jsonschema.validate(json.loads(call.arguments), whole)


@pytest.mark.parametrize(
    ("schema", "values", "others"),
    [
        ({"type": "string"}, VALUES, []),
        ({"type": ["integer", "null"]}, ["1", "null", "None"], ["a", "true", "1.5", ""]),
        ({"type": "boolean"}, ["true", "True", "false", "False"], ["None", "1"]),
        ({"anyOf": [{"type": "string"}, SMALL]}, ["a", "20", "true", "{", ""], ["21", "-7", "1.5"]),
        ({"anyOf": [{"type": "string"}, {"type": "number"}, SMALL]}, ["21", "21a", "1.5"], []),
        ({"anyOf": [{"type": "string"}, PAIR]}, ["a", '{"b": 2}', "21", "[1]"], ['{"b": 22}', "{", "{'b': 2}"]),
        ({"oneOf": [SMALL, {"type": "null"}, {"enum": ["a", ""]}]}, ["3", "null", "a", ""], ["b", "21"]),
        (ROWS, ["[]", '[{"b": 2}]'], ['[{"b": 22}]', "a"]),
        ({"enum": [1, "1", [True]]}, ["1", "[true]"], ["[True]", "2"]),
        ({"$ref": "#/properties/c", "description": "as c"}, ["true"], ["a"]),
        ({"$ref": "#/$defs/Tree"}, ["null", "[[], null]"], ["[[1]]"]),
        (True, VALUES, []),
    ],
    ids=str,
)
def test_values_that_a_schema_allows_are_let_through(
    vocabulary: Path, schema: Any, values: list[str], others: list[str]
) -> None:
    grammar = made(vocabulary, CODER, schemas={"f": one_argument(schema)})
    assert [value for value in values if not accepts(vocabulary, grammar, raw(CODER, value))] == []
    assert [value for value in others if accepts(vocabulary, grammar, raw(CODER, value))] == []


@pytest.mark.parametrize("others", [{"type": "string"}, {"enum": ["a", "b"]}], ids=["texts", "words"])
def test_a_list_beside_strings_may_hold_the_tag_that_ends_them(vocabulary: Path, others: dict[str, Any]) -> None:
    """The grammar let such a list through, and the reader cut it in two."""
    whole = one_argument({"anyOf": [others, {"type": "array", "items": {"type": "string"}}]})
    reader = CallReader(Calling(CODER, {"f": Arguments(whole)}))
    text = raw(CODER, '["</parameter>"]')
    assert accepts(vocabulary, made(vocabulary, CODER, schemas={"f": whole}), text)
    (call,) = reader.feed(text)[1]
    assert json.loads(call.arguments) == {"a": ["</parameter>"]}


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


def test_a_type_beside_that_of_an_object_leaves_arguments_between_tags_bound(vocabulary: Path) -> None:
    grammar = made(vocabulary, CODER, schemas={"f": one_argument(SMALL) | {"type": ["object", "null"]}})
    assert accepts(vocabulary, grammar, raw(CODER, "20"))
    assert not accepts(vocabulary, grammar, raw(CODER, "21"))


def test_arguments_without_names_keep_to_their_schema(vocabulary: Path) -> None:
    """Where no property was named, the schema of all others bound nothing."""
    grammar = made(vocabulary, CODER, schemas={"f": {"type": "object", "additionalProperties": SMALL}})
    assert accepts(vocabulary, grammar, written(CODER, ("f", {"x": 1, "any name": 20})))
    assert not accepts(vocabulary, grammar, written(CODER, ("f", {"x": 21})))
    whole = {"$ref": "#/$defs/All", "$defs": {"All": one_argument(SMALL), **DEFINITIONS}}
    grammar = made(vocabulary, CODER, schemas={"f": whole})
    assert accepts(vocabulary, grammar, raw(CODER, "3"))
    assert not accepts(vocabulary, grammar, raw(CODER, "21"))


def test_calls_as_older_templates_show_them_are_let_through(vocabulary: Path) -> None:
    """Their models write an id, which a bound answer forbade them."""
    for name, text in {
        "mistral": '[TOOL_CALLS]wait[CALL_ID]a1b2c3d4e[ARGS]{}[TOOL_CALLS]look[ARGS]{"at": "here"}',
        "mistral-list": '[TOOL_CALLS] [{"name": "wait", "arguments": {}, "id": "a1b2c3d4e"}]',
    }.items():
        assert accepts(vocabulary, made(vocabulary, FORMS[name]), text)
        said, calls = read(FORMS[name], text)
        assert (said, calls[0]) == ("", WAIT)


MANY = {f"d{i}": {"type": "object", "properties": {"b": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(300)}
WIDE = {f"p{i}": {"anyOf": [{"$ref": "#/$defs/Big"}, {"type": "null"}], "minimum": 1} for i in range(50)}
BIG = {"type": "object", "properties": {f"b{i}": {"type": "integer"} for i in range(500)}}


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"properties": {"a": {"type": "string", "pattern": "^b$"}}}, "f.a: pattern: no call can be bound"),
        ({"properties": {"a": {"anyOf": [{"type": "string", "minLength": 1}, {}]}}}, "minLength"),
        ({"properties": {"a": {"not": {}}}}, "not"),
        ({"properties": {"a": {"$ref": "file:///etc/passwd"}}}, r"\$ref file:///etc/passwd leads to nothing in it"),
        ({"properties": {"a": {"type": "array", "items": {"$ref": "#/nothing"}}}}, r"\$ref #/nothing leads"),
        ({"properties": {"a": {"$ref": "#anchor"}}}, r"\$ref #anchor leads"),
        ({"properties": {"a": {"enum": ["a</parameter>b"]}}}, "would end"),
        ({"properties": {"a": {"type": "string", "enum": [1]}}}, "allows nothing"),
        ({"properties": {"a": False}}, "allows nothing"),
        ({"properties": {"a": {"$ref": "#/$defs/L"}}, "$defs": {"L": {"$ref": "#/$defs/L"}}}, "allows nothing"),
        ({"properties": {"a": {"oneOf": [{"type": "string"}, {}]}}}, "oneOf"),
        ({"properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": MANY}, "more than 256 references"),
        ({"properties": WIDE, "$defs": {"Big": BIG}}, "characters"),
        ({"properties": {"a": {"anyOf": [{"type": "integer", "minimum": i} for i in range(300)]}}}, "256 schemas"),
        ({"properties": {"a" * 300: {}}}, "no tag can have '" + "a" * 80 + r"\.\.\.'"),
        ({"$ref": "#/$defs/no"}, "object"),
        ({"$ref": "#/$defs/A", "required": ["b"], "$defs": {"A": {"type": "object"}}}, r"\$ref"),
        ({"properties": {}, "required": ["a"], "additionalProperties": False}, "a is required, and no property"),
        ({"type": "object", "properties": {"a>b": {}}}, "a>b"),
        ({"type": "object", "properties": {"": {}}}, "tag"),
        ({"type": "object", "properties": [1]}, "object"),
        ({"type": "object", "required": [[]]}, "object"),
        ({"type": "array"}, "object"),
        ({"anyOf": [{"type": "object"}]}, "anyOf"),
        ({"type": "object", "properties": {str(i): {} for i in range(2000)}}, "1000"),
    ],
)
def test_a_schema_that_tags_cannot_bind_is_refused_by_name(
    vocabulary: Path, schema: dict[str, Any], named: str
) -> None:
    """Where the function is strict. And it binds nothing where nothing is bound."""
    with pytest.raises(ApiError, match=named):
        made(vocabulary, CODER, schemas={"f": schema}, strict=frozenset({"f"}))
    free = made(vocabulary, CODER, schemas={"f": schema}, must=False)
    assert accepts(vocabulary, free, "So. " + written(CODER, ("f", {"x": "y", "z": 1})))


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


def test_a_function_that_tags_cannot_bind_at_all_is_called_with_anything(vocabulary: Path) -> None:
    grammar = made(vocabulary, CODER, schemas={"f": {"anyOf": [{"type": "object"}]}, "wait": SCHEMAS["wait"]})
    assert accepts(vocabulary, grammar, written(CODER, ("f", {"x": 1, "y": "z"})))
    assert not accepts(vocabulary, grammar, written(CODER, LOOSE))


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
