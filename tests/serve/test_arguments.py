"""What a text stands for as an argument of a function, by the function's schema."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given, strategies as st

from tpspec.serve.arguments import MAX_LITERAL, Arguments

NUMBERS: dict[str, Any] = {"type": "number"}
WORD: dict[str, Any] = {"$ref": "#/$defs/Word"}
DEEP = "[" * 40 + "]" * 40


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "1", "1"),
        ({}, "1", 1),
        ({}, '"a"', '"a"'),
        (True, "null", None),
        (NUMBERS, "3", 3),
        (NUMBERS, "3.5 ", 3.5),
        (NUMBERS, "three", "three"),
        (NUMBERS, "NaN", "NaN"),
        (NUMBERS, "1e999", "1e999"),
        (NUMBERS, "9" * 5000, "9" * 5000),  # more digits than Python reads
        (NUMBERS, "true", "true"),
        ({"type": "integer"}, "3.5", "3.5"),
        ({"type": "integer"}, "3.0", 3),
        ({"type": "boolean"}, "\nTrue ", True),
        ({"type": ["string", "null"]}, "None", None),
        ({"type": ["string", "null"]}, "1", "1"),
        ({"enum": ["1", 2]}, "1", "1"),
        ({"enum": ["1", 2]}, "2", 2),
        ({"enum": ["1", 2]}, "3", "3"),
        ({"enum": ["1", 1]}, "1", "1"),
        ({"enum": [1]}, "true", "true"),  # in Python True is 1
        ({"const": {"a": [1]}}, '{"a": [1.0]}', {"a": [1]}),
        ({"type": "string", "enum": ["a", 1]}, "1", "1"),
        ({"anyOf": [{"type": "string"}, NUMBERS]}, "1", 1),
        ({"allOf": [NUMBERS, {"type": ["integer", "array"]}]}, "1", 1),  # whole numbers are numbers
        ({"allOf": [NUMBERS, {"type": ["integer", "array"]}]}, "1.5", "1.5"),
        ({"type": "string", "anyOf": [{"maxLength": 1}, {"maxLength": 2}]}, "1", "1"),
        (WORD, "1", "1"),
        ({"$ref": "#/$defs/nothing"}, "1", 1),
        ({"$ref": "#/$defs/Many/anyOf/1"}, "1", "1"),  # as zod writes what it has met before
        ({"$ref": "#/$defs/Many/anyOf/2"}, "1", 1),
        ({"$ref": "#/$defs/Box%3Cstr%3E"}, "1", "1"),
        ({"type": ["string", "object"]}, '{"a": "\\ud800"}', '{"a": "\\ud800"}'),  # half a pair
        ({"type": "array"}, "[0x" + "f" * 4000 + "]", "[0x" + "f" * 4000 + "]"),
        ({"$ref": "#/$defs/Loop"}, "1", "1"),  # which offers nothing
        ({"type": "array"}, "[1, 'a', None]", [1, "a", None]),
        ({"type": "object"}, "{'a': True}", {"a": True}),
        ({"type": "array"}, r"['\d']", [r"\d"]),  # of which Python warns
        ({"type": "object"}, "{1: 2}", "{1: 2}"),
        ({"type": "array"}, "[1j]", "[1j]"),
        ({"type": "array"}, "[1e999]", "[1e999]"),
        ({"type": "array"}, "[__import__('os').getpid()]", "[__import__('os').getpid()]"),
        ({"type": "array"}, DEEP[:-1], DEEP[:-1]),
        ({"type": "array"}, "[" * 100_000, "[" * 100_000),
        ({"type": "string"}, "{'a': 1}", "{'a': 1}"),
    ],
    ids=str,
)
def test_what_a_text_stands_for(schema: Any, text: str, value: Any) -> None:
    """Itself, where the schema allows no value that it could be the writing of."""
    several = {"anyOf": [NUMBERS, {"type": "string"}]}
    definitions = {
        "Many": several,
        "Box<str>": {"type": "string"},
        "Word": {"type": "string"},
        "Loop": {"$ref": "#/$defs/Loop"},
    }
    found = Arguments({"properties": {"a": schema}, "$defs": definitions}).value("a", text)
    assert (found, type(found) is bool) == (value, type(value) is bool)


def test_a_schema_may_refer_to_all_of_itself_and_name_no_argument() -> None:
    """Arguments that the root only refers to, or that additionalProperties describe, were read as of no type."""
    inner = {"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": {"type": "boolean"}}
    for schema in (inner, {"$ref": "#/$defs/Inner", "$defs": {"Inner": inner}}):
        function = Arguments(schema)
        assert [function.value(name, "1") for name in ("a", "b")] == ["1", "1"]
        assert function.value("b", "true") is True
    looped = Arguments({"$ref": "#"})
    assert looped.value("a", "1") == 1


def in_unions(depth: int, schema: Any) -> Any:
    return schema if depth == 0 else {"anyOf": [in_unions(depth - 1, schema)]}


def test_a_schema_that_holds_itself_is_looked_at_for_so_long() -> None:
    """A schema that refers to itself twice was followed two to the power of its depth times; one that led far, to the
    end of Python's stack, and the server's."""
    tree = {"anyOf": [{"$ref": "#/$defs/t"}, {"$ref": "#/$defs/t"}, {"type": "integer"}]}
    chain: dict[str, Any] = {f"c{i}": {"$ref": f"#/$defs/c{i + 1}"} for i in range(2000)}
    pairs = {f"p{i}": {"anyOf": [{"$ref": f"#/$defs/p{i + 1}"}] * 3} for i in range(30)}
    far = {f"f{i}": in_unions(12, {"$ref": f"#/$defs/f{i + 1}"}) for i in range(100)}
    many = {f"m{i}": {"$ref": "#/$defs/p0"} for i in range(100)}
    properties = {"a": tree, "b": {"$ref": "#/$defs/c0"}, "c": {"$ref": "#/$defs/f0"}, **many}
    function = Arguments({"properties": properties, "$defs": {"t": tree, **chain, **pairs, **far}})
    started = time.monotonic()
    assert [function.value("a", text) for text in ("1", "x", "null")] == [1, "x", "null"]
    assert [function.value(name, "1") for name in ("b", "c")] == [1, 1]
    assert [function.value(name, "1") for name in many] == [1] * 100
    assert function.schema.offer_of({"type": "integer", "anyOf": [{}]}).kinds == {"integer"}  # which takes no looking
    assert time.monotonic() - started < 10


VALUES = list(range(5_000))
FIVEFOLD = {f"p{i}": {"anyOf": [{"$ref": f"#/$defs/p{i + 1}"}] * 5} for i in range(5)}


@pytest.mark.parametrize(
    ("schema", "last"),
    [
        ({"allOf": [{"enum": VALUES}, {"enum": [*range(4_999, 10_000)]}]}, {}),
        ({"allOf": [{"enum": VALUES}, *[{}] * 7_000]}, {}),
        ({"allOf": [{"enum": VALUES}, *[{"anyOf": [{"type": "integer"}, {"const": 1}]}] * 1_000]}, {}),
        ({"anyOf": [{"enum": VALUES}, *[{"const": "a"}] * 3_000]}, {}),
        ({"$ref": "#/$defs/p0"}, {"$ref": "#/" + "/" * 30_000}),
        ({"$ref": "#/$defs/p0"}, {"enum": [4_999, [*range(9_000)]]}),
        ({"$ref": "#/$defs/p0"}, {"type": ["integer"] * 5_000}),
    ],
    ids=["two lists", "nothing more", "types", "union", "long reference", "long value", "many types"],
)
def test_what_is_long_is_looked_through_once(schema: dict[str, Any], last: dict[str, Any]) -> None:
    """Each value of one list was held against each of the other; and all of it again wherever it was referred to."""
    function = Arguments({"properties": {"a": schema}, "$defs": FIVEFOLD | {"p5": last}})
    started = time.monotonic()
    assert function.value("a", "4999") == 4999
    assert time.monotonic() - started < 2


@given(text=st.text(max_size=40))
def test_a_string_is_never_read(text: str) -> None:
    assert Arguments({"properties": {"a": {"type": "string"}}}).value("a", text) == text


@pytest.mark.parametrize("size", [9, MAX_LITERAL])
def test_a_list_as_python_writes_it_is_read_up_to_a_length(size: int) -> None:
    """Python's own reader takes a thousand times as long as JSON's."""
    text = f"['{'a' * size}']"
    expected: Any = ["a" * size] if size < 99 else text
    assert Arguments({"properties": {"a": {"type": "array"}}}).value("a", text) == expected
