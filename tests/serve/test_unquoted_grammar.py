"""Grammars of calls as Gemma 4 writes them: what a schema allows is let through, and read as what it is; no more is."""

from __future__ import annotations

import json
import time
from itertools import permutations
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import assume, given, settings
from hypothesis.strategies import SearchStrategy, builds, dictionaries, lists, sampled_from

from tests.serve.test_tagged_grammar import BIG, MANY, SIMPLE, WIDE, one_argument, unions
from tests.serve.written_calls import FORMS, LOOSE, PAIR, SCHEMAS, SMALL, accepts, made, unquoted, written
from tpspec.errors import UserError
from tpspec.serve.arguments import Arguments
from tpspec.serve.call_formats import Format
from tpspec.serve.errors import ApiError
from tpspec.serve.grammars import MAX_TOOLS_CHARS
from tpspec.serve.tools import Calling, CallReader

GEMMA = FORMS["gemma-4"]
QUOTE = '<|"|>'
VALUES: list[Any] = [
    *("", "a", "a b", "1", "\n", "True", '{"', "b:1,", "日本 }", " a "),
    *(0, 4, 20, 21, -7, 1.5, True, False, None),
    *([], [1], ["a"], [True], [[], None], [[1]], [{"b": 2}], [{"b": 22}], ["a", [1, {"x": "]"}]]),
    *({}, {"b": 2}, {"b": "x"}, {"b": 2, "c": 1}, {"a b": {"b": []}}, {"B": 1, "a": 2}),
]
RAW = [
    *("3.0", "1e+22", "1e999", "-1e-99", "9" * 300, f"{QUOTE}<tool_call|>{QUOTE}"),
    *("1", "01", "1.", "NaN", "None", "tru", "1e2", "-", '"a"', "'a'", "a", "", " 1", "[1,]", "[,1]", "{b:2", "{b:2}}"),
    *(
        "{b:2,}",
        '{"b":2}',
        "{b: 2}",
        "{ b:2}",
        "{b:2,b:22}",
        "{b:22,b:2}",
        "{:1}",
        "[[], null]",
        f"{QUOTE}a",
        f"a{QUOTE}",
    ),
    *(
        f"{QUOTE}a{QUOTE}{QUOTE}b{QUOTE}",
        f"{{{QUOTE}b{QUOTE}:2}}",
        f"{{{QUOTE}b{QUOTE}:22}}",
        "{b :22}",
        "{\u00a0b:22}",
    ),
]


def raw(text: str) -> str:
    return f"<|tool_call>call:f{{a:{text}}}<tool_call|>"


def in_each_order(value: Any) -> list[str]:
    """Of its keys: those that a schema does not name come last."""
    if not isinstance(value, dict):
        return [unquoted(value, QUOTE)]
    pairs = [unquoted({key: one}, QUOTE)[1:-1] for key, one in value.items()]
    return [f"{{{','.join(some)}}}" for some in permutations(pairs)]


def nested() -> SearchStrategy[Any]:
    some = unions()
    a_list = builds(lambda items, more: {"type": "array", "items": items} | more, some, sampled_from(SIZES))
    an_object = builds(
        lambda properties, required, others: {
            "type": "object", "properties": properties, "required": required, "additionalProperties": others
        },
        dictionaries(sampled_from(["b", "c", "a b", "B", "a:b"]), some, max_size=3),
        lists(sampled_from(["b", "c"]), max_size=1),
        sampled_from([True, False, SMALL]),
    )  # fmt: skip
    return some | a_list | an_object


SIZES: list[dict[str, int]] = [{}, {"minItems": 1}, {"minItems": 2}, {"maxItems": 1}, {"minItems": 1, "maxItems": 2}]


@settings(max_examples=150, deadline=None)
@given(schema=nested())
def test_what_a_schema_allows_is_let_through_and_nothing_else_is(vocabulary: Path, schema: Any) -> None:
    """Grammar, reader and schema are three programs, and could each have their own idea of a value."""
    whole = one_argument(schema)
    try:
        grammar = made(vocabulary, GEMMA, schemas={"f": whole}, strict=frozenset({"f"}))
    except ApiError:  # refused by name
        return
    assume(not _is_empty(vocabulary, grammar))  # of bounds that exclude each other
    validator = jsonschema.Draft202012Validator(whole)
    for value in VALUES:
        is_let_through = any(accepts(vocabulary, grammar, raw(text)) for text in in_each_order(value))
        assert is_let_through == validator.is_valid({"a": value}), value
    for text in RAW:
        if accepts(vocabulary, grammar, raw(text)):
            (call,) = CallReader(Calling(GEMMA, {"f": Arguments(whole)}, lenient=False)).feed(raw(text))[1]
            validator.validate(json.loads(call.arguments))


def _is_empty(vocabulary: Path, grammar: str) -> bool:
    try:
        accepts(vocabulary, grammar, "")
    except UserError as fault:
        if "nsatisfiable" in str(fault):
            return True
        raise
    return False


def test_what_is_let_through_is_not_trivial(vocabulary: Path) -> None:
    """The test above passes where every schema is refused."""
    made_of = [schema for schema in SIMPLE if _is_made(vocabulary, schema)]
    assert len(made_of) >= len(SIMPLE) - 2


def _is_made(vocabulary: Path, schema: Any) -> bool:
    try:
        made(vocabulary, GEMMA, schemas={"f": one_argument(schema)}, strict=frozenset({"f"}))
    except ApiError:
        return False
    return True


def test_keys_come_in_the_order_in_which_templates_show_them(vocabulary: Path) -> None:
    """A model that was bound to another order would have left out what it had in mind."""
    schema = {"properties": {"c": {}, "B": {}, "a": {}}, "required": ["d", "c", "B"]}
    grammar = made(vocabulary, GEMMA, schemas={"f": schema})
    for keys, is_let_through in (("aBcd", True), ("Bcd", True), ("cBd", False), ("Bcad", False), ("aBcde", True)):
        text = f"<|tool_call>call:f{{{','.join(f'{key}:1' for key in keys)}}}<tool_call|>"
        assert accepts(vocabulary, grammar, text) == is_let_through


def test_a_key_that_would_be_read_otherwise_stands_between_marks(vocabulary: Path) -> None:
    for key in ("a:b", "a,b", " a", '"', "{", "a\n", ""):
        schema = {"properties": {key: SMALL}, "required": [key]}
        grammar = made(vocabulary, GEMMA, schemas={"f": schema}, strict=frozenset("f"))
        text = f"<|tool_call>call:f{{{QUOTE}{key}{QUOTE}:3}}<tool_call|>"
        assert accepts(vocabulary, grammar, text)
        (call,) = CallReader(Calling(GEMMA, {"f": Arguments(schema)})).feed(text)[1]
        assert json.loads(call.arguments) == {key: 3}


ENDLESS = {"type": "array", "items": {"$ref": "#/$defs/L"}, "minItems": 1}


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"properties": {"a": {"type": "string", "pattern": "^b$"}}}, "f: pattern: no call can be bound"),
        ({"properties": {"a": {"anyOf": [{"type": "string", "minLength": 1}, {}]}}}, "minLength"),
        ({"properties": {"a": {"type": "object", "patternProperties": {}}}}, "patternProperties"),
        ({"properties": {"a": {"type": "array", "prefixItems": [{}]}}}, "prefixItems"),
        ({"properties": {"a": {"type": "array", "items": [{}]}}}, "unlike each other"),
        ({"properties": {"a": {"type": "array", "minItems": 2, "maxItems": 1}}}, "not in order"),
        ({"properties": {"a": {"type": "array", "minItems": 5000}}}, "not within 1000"),
        ({"properties": {"a": {"type": "array", "minItems": 1, "items": False}}}, "allows nothing"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "allows nothing that ends"),
        ({"properties": {"a": {"$ref": "#/$defs/L"}}, "$defs": {"L": ENDLESS}}, "allows nothing that ends"),
        ({"properties": {"a": {"not": {}}}}, "not"),
        ({"properties": {"a": {"$ref": "#/nothing"}}}, r"\$ref #/nothing leads to nothing in it"),
        ({"properties": {"a": {"enum": [f"a{QUOTE}b"]}}}, "would end it"),
        ({"properties": {f"a{QUOTE}": {}}}, "would end it"),
        ({"properties": {"a": {"type": "string", "enum": [1]}}}, "allows nothing"),
        ({"properties": {"a": {"$ref": "#/$defs/L"}}, "$defs": {"L": {"$ref": "#/$defs/L"}}}, "allows nothing"),
        ({"properties": {"a": {"oneOf": [{"type": "string"}, {}]}}}, "oneOf"),
        ({"properties": WIDE, "$defs": {"Big": BIG}}, "anyOf"),
        ({"properties": {"a": {"anyOf": [{"type": "integer", "minimum": i} for i in range(300)]}}}, "256 schemas"),
        ({"$ref": "#/$defs/no"}, "object"),
        ({"properties": {}, "required": ["a"], "additionalProperties": False}, "a is required, and no property"),
        ({"type": "object", "properties": [1]}, "properties"),
        ({"type": "object", "required": [[]]}, "required"),
        ({"type": "array"}, "object"),
        ({"anyOf": [{"type": "object"}]}, "anyOf"),
        ({"type": "object", "properties": {str(i): {} for i in range(2000)}}, "1000"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_schema_that_cannot_bind_is_refused_by_name(vocabulary: Path, schema: dict[str, Any], named: str) -> None:
    """Where the function is strict. And it binds nothing of the rest where it is not."""
    with pytest.raises(ApiError, match=named):
        made(vocabulary, GEMMA, schemas={"f": schema}, strict=frozenset({"f"}))
    free = made(vocabulary, GEMMA, schemas={"f": schema}, must=False)
    assert accepts(vocabulary, free, "So. " + written(GEMMA, ("f", {"x": "y", "z": 1})))
    if named != "1000":
        accepts(vocabulary, made(vocabulary, GEMMA, schemas={"f": schema}), "")


def test_what_cannot_bind_leaves_the_rest_bound_where_a_function_is_not_strict(vocabulary: Path) -> None:
    inner = {"type": "object", "properties": {"b": SMALL}, "patternProperties": {"c": {}}, "minProperties": 1}
    schema = one_argument(inner) | {"dependentRequired": {"a": ["c"]}}
    grammar = made(vocabulary, GEMMA, schemas={"f": schema})
    assert accepts(vocabulary, grammar, raw("{b:20}"))
    for text in ("{b:21}", "3", f"{QUOTE}x{QUOTE}"):
        assert not accepts(vocabulary, grammar, raw(text))
    pair = {"type": "array", "prefixItems": [SMALL, {"type": "string"}], "items": False}
    grammar = made(vocabulary, GEMMA, schemas={"f": one_argument(pair)})
    assert accepts(vocabulary, grammar, raw(f"[3,{QUOTE}x{QUOTE}]"))
    grammar = made(vocabulary, GEMMA, schemas={"f": one_argument({"type": "object", "properties": 1})})
    assert accepts(vocabulary, grammar, raw("{b:[]}"))
    assert not accepts(vocabulary, grammar, raw("[]"))


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"a": {"type": "array", "items": False}}, "{a:[]}"),
        ({"a": {"type": "array", "maxItems": 0, "items": {"pattern": "x"}}}, "{a:[]}"),
        ({"a": False, "b": SMALL}, "{b:3}"),
        ({"a": {"type": "array", "items": SMALL, "maxItems": 1}}, "{a:[3]}"),
        ({"a": {"type": "array", "items": SMALL, "minItems": 3}}, "{a:[3,4,5,6]}"),
        ({"a": {"$ref": "#"}}, "{a:{a:{}}}"),
    ],
    ids=str,
)
def test_what_may_be_empty_or_missing_is_no_fault(vocabulary: Path, schema: dict[str, Any], text: str) -> None:
    """Refused for a rule that nobody needs; and a list of one at most was a grammar that nothing reads."""
    whole = {"properties": schema, "additionalProperties": False}
    grammar = made(vocabulary, GEMMA, schemas={"f": whole}, strict=frozenset("f"))
    assert accepts(vocabulary, grammar, f"<|tool_call>call:f{text}<tool_call|>")


@pytest.mark.parametrize("form", ["gemma-4", "hermes", "qwen3-coder"])
def test_a_thousand_properties_can_be_followed(vocabulary: Path, form: str) -> None:
    """The compiler took them, and the first token did not: a client's schema was the server's fault."""
    schema = {"properties": {f"p{i}": {"type": "integer"} for i in range(1000)}}
    call = ("f", {"p7": 1, "p999": 2})
    assert accepts(vocabulary, made(vocabulary, FORMS[form], schemas={"f": schema}), written(FORMS[form], call))


@pytest.mark.parametrize("key", [" ", "\t", "\x1c", "\u3000"])
def test_a_key_of_blanks_is_let_through_nowhere(vocabulary: Path, key: str) -> None:
    """The reader finds no key there, and the call was lost."""
    grammar = made(vocabulary, GEMMA, schemas={"f": {"additionalProperties": SMALL}}, strict=frozenset("f"))
    assert not accepts(vocabulary, grammar, f"<|tool_call>call:f{{{key}:3}}<tool_call|>")
    assert accepts(vocabulary, grammar, f"<|tool_call>call:f{{{key}b:3}}<tool_call|>")


def test_what_has_no_marks_is_no_text_where_it_may_be_something_else(vocabulary: Path) -> None:
    """A number was taken for the text among those listed that looks like it, as where nothing has marks."""
    for schema, value in (({"enum": ["1", 1]}, 1), ({"anyOf": [SMALL, {"enum": ["1"]}]}, 1), ({"enum": ["1"]}, "1")):
        reader = CallReader(Calling(GEMMA, {"f": Arguments(one_argument(schema))}))
        assert [json.loads(call.arguments) for call in reader.feed(raw("1"))[1]] == [{"a": value}]


def test_a_grammar_that_grows_too_long_is_refused_while_it_grows(vocabulary: Path) -> None:
    """An object that each of many values mentions was written anew for each: 6 s, and 348 MB."""
    wide = {"type": "object", "properties": {f"q{i}": True for i in range(750)}}
    mentions = {f"p{i}": {"anyOf": [{"$ref": "#/$defs/a"}, {"const": i}]} for i in range(900)}
    started = time.monotonic()
    grammar = made(vocabulary, GEMMA, schemas={"f": {"properties": mentions, "$defs": {"a": wide}}})
    assert len(grammar) < MAX_TOOLS_CHARS / 2
    others = {f"f{i}": one_argument({**wide, "description": "a", "maxProperties": i}) for i in range(100)}
    with pytest.raises(ApiError, match="longer"):
        made(vocabulary, GEMMA, schemas=others)
    assert time.monotonic() - started < 4


def test_definitions_may_lead_far(vocabulary: Path) -> None:
    """Three hundred that each hold the next were too deep for what follows them one within the other."""
    whole = {"properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": {**MANY, "d300": SMALL}}
    grammar = made(vocabulary, GEMMA, schemas={"f": whole}, strict=frozenset("f"))
    assert accepts(vocabulary, grammar, raw("{b:{b:{}}}"))
    assert not accepts(vocabulary, grammar, raw("{b:{b:3}}"))


def test_many_functions_share_what_is_said_of_their_arguments(vocabulary: Path) -> None:
    kinds = ("string", "integer", "boolean", "array")
    properties = {f"property_{i}": {"type": kinds[i % 4], "description": f"the {i}th"} for i in range(20)}
    schemas = {f"tool_number_{i}": {"type": "object", "properties": properties} for i in range(128)}
    for strict in (frozenset[str](), frozenset(schemas)):
        grammar = made(vocabulary, GEMMA, schemas=schemas, strict=strict)
        assert len(grammar) < MAX_TOOLS_CHARS / 8
        assert accepts(vocabulary, grammar, written(GEMMA, ("tool_number_9", {"property_1": 1})))
        assert not accepts(vocabulary, grammar, written(GEMMA, ("tool_number_9", {"property_1": "a"})))
    wide = {f"f{i}": {"properties": {f"{i} {j}": {"const": f"{i} {j}"} for j in range(1000)}} for i in range(12)}
    with pytest.raises(ApiError, match="the grammar of their calls would be longer"):
        made(vocabulary, GEMMA, schemas=wide)


def test_a_part_that_does_not_compile_has_the_name_of_its_function(vocabulary: Path) -> None:
    grammar = made(vocabulary, GEMMA, schemas={"put": one_argument(SMALL)}, strict=frozenset({"put"}))
    names = [part.get("name") for part in json.loads(grammar)["grammars"][1:]]
    assert names == ["integer-0-of-put"]


@pytest.mark.parametrize("form", [GEMMA, FORMS["functiongemma"]], ids=lambda form: form.name)
def test_a_string_ends_at_the_first_mark_however_it_is_spelled(vocabulary: Path, form: Format) -> None:
    """A mark that is a token can be spelled by others: what followed would have been arguments that nobody bound."""
    (quote,) = form.form.marks
    schema = one_argument({"type": "string"}) | {"required": ["a", "c"]}
    grammar = made(vocabulary, form, schemas={"f": schema, **SCHEMAS}, must=False, strict=frozenset("f"))
    for value, is_let_through in (("x", True), ("x}", True), (f"x{quote},c:1,a:{quote}y", False)):
        text = written(form, ("f", {"a": value, "c": True}))
        assert accepts(vocabulary, grammar, text) == is_let_through
    assert accepts(vocabulary, grammar, written(form, LOOSE, ("tell", PAIR)))
