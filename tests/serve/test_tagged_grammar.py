"""Grammars of calls with tags around each argument: what they let through is read as what its schema allows."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis.strategies import SearchStrategy, builds, lists, sampled_from

from tests.serve.written_calls import CODER, FORMS, GLM, LOOSE, PAIR, SCHEMAS, SMALL, accepts, made, written
from tpspec.errors import UserError
from tpspec.serve.arguments import Arguments
from tpspec.serve.call_formats import Format
from tpspec.serve.errors import ApiError
from tpspec.serve.grammars import MAX_TOOLS_CHARS
from tpspec.serve.tools import Calling, CallReader

SEED = FORMS["seed"]
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


@settings(max_examples=40, deadline=None)
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
        ({"anyOf": [{"type": ["string", "integer"]}, {"type": "number", "minimum": 5}]}, ["a", "3", "5.5"], ["4.5"]),
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


def test_a_type_beside_that_of_an_object_leaves_arguments_between_tags_bound(vocabulary: Path) -> None:
    grammar = made(vocabulary, CODER, schemas={"f": one_argument(SMALL) | {"type": ["object", "null"]}})
    assert accepts(vocabulary, grammar, raw(CODER, "20"))
    assert not accepts(vocabulary, grammar, raw(CODER, "21"))


NUMBERED = one_argument({"type": "integer"}) | {"properties": {"a": {"type": "integer"}, "l": {"type": "array"}}}
OPEN: dict[str, Any] = {"properties": {"a": {"type": ["array", "object"]}, "b/ c": {"type": "object"}}}
OTHERS: dict[str, Any] = {"properties": {"n": {"type": "integer"}}, "additionalProperties": {"type": "array"}}


def tagged(function: str, key: str, value: str) -> str:
    inner = f"<function={function}>\n<parameter={key}>{value}</parameter>\n</function>"
    return f"<seed:tool_call>\n{inner}\n</seed:tool_call>"


SWALLOWED = tagged("u", "a", '["x') + tagged("f", "l", '["' + tagged("f", "a", "x") + '"]')


@pytest.mark.parametrize(
    ("text", "call"),
    [
        (tagged("u", "a", '["</parameter>"]'), {"a": ["</parameter>"]}),
        (tagged("u", "a", '{"b": "</parameter></function>"}'), {"a": {"b": "</parameter></function>"}}),
        (tagged("u", "a", "x ["), {"a": "x ["}),
        (tagged("u", "b/ c", "["), {"b/ c": "["}),
        (tagged("u", "b", "["), {"b": "["}),
        (tagged("o", "b", '["<"]'), {"b": ["<"]}),
        (tagged("o", "n", "["), {"n": "["}),
        (tagged("u", "a", '["x]'), None),
        (tagged("u", " a", '["x]'), None),
        (tagged("u", "b/ c", '{"x}'), None),
        (tagged("o", "b", "['"), None),
        (SWALLOWED, None),
    ],
)
def test_where_a_value_ends_grammar_and_reader_agree_beside_a_strict_function(
    vocabulary: Path, text: str, call: dict[str, Any] | None
) -> None:
    """To the grammar a list of a function that is not strict was text up to the first tag, to the reader it was JSON:
    a call was lost, or one that the grammar took for a part of it was read as that of the strict function."""
    schemas = {"f": NUMBERED, "u": OPEN, "o": OTHERS}
    grammar = made(vocabulary, SEED, schemas=schemas, must=False, strict=frozenset("f"))
    assert accepts(vocabulary, grammar, text) == (call is not None)
    calling = Calling(SEED, {name: Arguments(schema) for name, schema in schemas.items()}, lenient=False)
    if call is not None:
        assert [json.loads(one.arguments) for one in CallReader(calling).feed(text)[1]] == [call]


def test_a_list_that_binds_nothing_is_whole_where_a_call_is_required(vocabulary: Path) -> None:
    for schema in ({"not": {}, **OPEN}, {"properties": {"a": {"type": "array", "items": {"$ref": "#/no"}}}}):
        grammar = made(vocabulary, SEED, schemas={"f": schema})
        assert accepts(vocabulary, grammar, tagged("f", "a", '["</parameter>"]'))
        assert not accepts(vocabulary, grammar, tagged("f", "a", '["x]'))


def test_a_listed_text_that_would_be_read_as_the_beginning_of_a_list_is_refused(vocabulary: Path) -> None:
    """It was let through, and the call that held it never ended."""
    whole = one_argument({"anyOf": [{"enum": ['["a']}, {"type": "array"}]})
    grammar = made(vocabulary, CODER, schemas={"f": whole}, strict=frozenset("f"))
    assert accepts(vocabulary, grammar, raw(CODER, '["a'))  # whose lines end a string
    with pytest.raises(ApiError, match=r"f\.a: </parameter> would end a value that holds it, or begins as a list"):
        made(vocabulary, SEED, schemas={"f": whole}, strict=frozenset("f"))


def test_arguments_come_in_the_order_in_which_the_model_is_shown_them(vocabulary: Path) -> None:
    """Those that have to be there came first, which is not what a model has in mind; those not described come last."""
    schema = {"properties": {"a": {}, "b": {}, "c": {}}, "required": ["d", "c", "b"]}
    grammar = made(vocabulary, GLM, schemas={"f": schema})
    for keys, is_let_through in (("abcd", True), ("bcd", True), ("cbd", False), ("bcad", False), ("dbc", False)):
        assert accepts(vocabulary, grammar, written(GLM, ("f", dict.fromkeys(keys, 1)))) == is_let_through


def test_arguments_without_names_keep_to_their_schema(vocabulary: Path) -> None:
    """Where no property was named, the schema of all others bound nothing."""
    grammar = made(vocabulary, CODER, schemas={"f": {"type": "object", "additionalProperties": SMALL}})
    assert accepts(vocabulary, grammar, written(CODER, ("f", {"x": 1, "any name": 20})))
    assert not accepts(vocabulary, grammar, written(CODER, ("f", {"x": 21})))
    whole = {"$ref": "#/$defs/All", "$defs": {"All": one_argument(SMALL), **DEFINITIONS}}
    grammar = made(vocabulary, CODER, schemas={"f": whole})
    assert accepts(vocabulary, grammar, raw(CODER, "3"))
    assert not accepts(vocabulary, grammar, raw(CODER, "21"))


MANY = {f"d{i}": {"type": "object", "properties": {"b": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(300)}
WIDE = {f"p{i}": {"anyOf": [{"$ref": "#/$defs/Big"}, {"type": "null"}], "minimum": i} for i in range(50)}
BIG = {"type": "object", "properties": {f"b{i}": {"type": "integer"} for i in range(500)}}


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"properties": {"a": {"type": "string", "pattern": "^b$"}}}, "f.a: pattern: no call can be bound"),
        ({"properties": {"a": {"anyOf": [{"type": "string", "minLength": 1}, {}]}}}, "minLength"),
        ({"properties": {"a": {"not": {}}}}, "not"),
        ({"properties": {"a": {"enum": ["b"], "minLength": 1, "note": 1}}}, "f.a: minLength: no call"),
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


@pytest.mark.parametrize(
    "more",
    [{"minProperties": 1}, {"dependentRequired": {"a": ["c"]}}, {"strict": True}, {"$comment": "a"}, {"format": "b"}],
    ids=str,
)
def test_what_cannot_bind_leaves_the_rest_bound_where_a_function_is_not_strict(
    vocabulary: Path, more: dict[str, Any]
) -> None:
    """One keyword too many of the arguments, or of one that has to be of a list, and nothing was bound at all."""
    for more_of_it in ({"minLength": 1}, {"pattern": "^a$"}, {"enumDescriptions": ["1st", "2nd"]}):
        schema = one_argument({"type": "string", "enum": ["a", "b"]} | more_of_it) | more
        grammar = made(vocabulary, CODER, schemas={"f": schema})
        assert accepts(vocabulary, grammar, raw(CODER, "b"))
        assert not accepts(vocabulary, grammar, raw(CODER, "c"))
        assert not accepts(vocabulary, grammar, written(CODER, ("f", {})))


def test_what_is_no_keyword_is_no_reason_to_refuse_a_strict_function(vocabulary: Path) -> None:
    schema = one_argument({"enum": ["a", "b"], "enumDescriptions": ["1st", "2nd"]}) | {"strict": True}
    grammar = made(vocabulary, CODER, schemas={"f": schema}, strict=frozenset("f"))
    assert accepts(vocabulary, grammar, raw(CODER, "b"))
    assert not accepts(vocabulary, grammar, raw(CODER, "c"))


def test_many_functions_share_what_is_said_of_their_arguments(vocabulary: Path) -> None:
    """Tools whose schemas are a fifth of what they may be were refused, for a grammar of which they knew nothing."""
    kinds = ("string", "integer", "boolean", "array")
    properties = {f"property_{i}": {"type": kinds[i % 4], "description": f"the {i}th"} for i in range(20)}
    schemas = {f"tool_number_{i}": {"type": "object", "properties": properties} for i in range(128)}
    for strict in (frozenset[str](), frozenset(schemas)):
        grammar = made(vocabulary, CODER, schemas=schemas, strict=strict)
        assert len(grammar) < MAX_TOOLS_CHARS / 8
        assert accepts(vocabulary, grammar, written(CODER, ("tool_number_9", {"property_1": 1})))
        assert not accepts(vocabulary, grammar, written(CODER, ("tool_number_9", {"property_1": "a"})))
    wide = {f"f{i}": {"properties": {f"{i} {j}": {"const": f"{i} {j}"} for j in range(1000)}} for i in range(12)}
    with pytest.raises(ApiError, match="the grammar of their calls would be longer"):
        made(vocabulary, CODER, schemas=wide)


def test_what_would_be_too_long_binds_nothing_where_a_function_is_not_strict(vocabulary: Path) -> None:
    lists = {f"l{i}": {"type": "array", "items": {"$ref": "#/$defs/Big"}, "minItems": i} for i in range(50)}
    grammar = made(vocabulary, CODER, schemas={"f": {"properties": lists, "$defs": {"Big": BIG}}})
    parts = {part.get("name") for part in json.loads(grammar)["grammars"]}
    assert {"argument-l3-of-f", "any-array"} <= parts
    assert "argument-l49-of-f" not in parts


def test_a_part_that_does_not_compile_has_the_name_of_its_argument(vocabulary: Path) -> None:
    """It had its number, which is nowhere in what a client wrote."""
    properties = {"at": {"type": "string"}, "files": {"type": "array", "uniqueItems": True}, "by day": SMALL}
    grammar = made(vocabulary, CODER, schemas={"put": {"properties": properties}}, strict=frozenset({"put"}))
    assert [part.get("name") for part in json.loads(grammar)["grammars"][1:]] == [
        "argument-files-of-put",
        "argument_2-of-put",
    ]


def test_what_excludes_one_another_is_told_in_one_reading(vocabulary: Path) -> None:
    """Each branch of a `oneOf` was held against all before it, in a copy."""
    some = [{"enum": [f"{i} {j}" for j in range(20)]} for i in range(900)]
    started = time.monotonic()
    made(vocabulary, CODER, schemas={"f": one_argument({"oneOf": some})})
    assert time.monotonic() - started < 3


def test_a_function_that_tags_cannot_bind_at_all_is_called_with_anything(vocabulary: Path) -> None:
    grammar = made(vocabulary, CODER, schemas={"f": {"anyOf": [{"type": "object"}]}, "wait": SCHEMAS["wait"]})
    assert accepts(vocabulary, grammar, written(CODER, ("f", {"x": 1, "y": "z"})))
    assert not accepts(vocabulary, grammar, written(CODER, LOOSE))
