"""Fields of a body that bind its answer: OpenAI's `response_format`, vLLM's `structured_outputs` and `guided_*`.

Turns them into the text of one grammar. Must not know how it is compiled, or what becomes of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tpspec.serve.errors import bad_request, unsupported
from tpspec.serve.grammars import choice, json_schema, lark, regex

Schema = dict[str, Any]


class Shape(BaseModel):
    """A null field is not given, as clients write it; what is inside a client's own data, such as a schema, stays."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_not_given(cls, value: object) -> object:
        return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value


class NamedSchema(Shape):
    """Its field `strict` asks for what is always so."""

    name: str = Field("schema", max_length=64)
    schema_: Schema = Field(alias="schema")


class PlainFormat(Shape):
    type: Literal["text"]


class ObjectFormat(Shape):
    type: Literal["json_object"]


class SchemaFormat(Shape):
    type: Literal["json_schema"]
    json_schema: NamedSchema


class FlatSchemaFormat(NamedSchema):
    type: Literal["json_schema"]


class StructuredOutputs(Shape):
    json_: Schema | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool = False
    structural_tag: Schema | str | None = None


Format = Annotated[PlainFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")]
FlatFormat = Annotated[PlainFormat | ObjectFormat | FlatSchemaFormat, Field(discriminator="type")]


class TextOptions(Shape):
    """Of /v1/responses."""

    format: FlatFormat = PlainFormat(type="text")
    verbosity: Literal["medium"] = "medium"


class Constraints(Shape):
    """What completions, chats and responses share."""

    response_format: Format = PlainFormat(type="text")
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    @property
    def grammar(self) -> str:
        """What binds the answer; empty where nothing does. Raises ApiError."""
        return self.bound[1]

    @property
    def bound(self) -> tuple[str, str]:
        """The field that binds it, and how; both empty where nothing does. Raises ApiError."""
        outputs = self.structured_outputs or StructuredOutputs.model_validate({})
        if outputs.structural_tag is not None:
            raise unsupported("structured_outputs.structural_tag")
        asked: list[tuple[str, Callable[[Any, str], str], object]] = [
            ("response_format", of_format, self.response_format),
            ("structured_outputs.json", of_schema, outputs.json_),
            ("structured_outputs.json_object", of_schema, {"type": "object"} if outputs.json_object else None),
            ("structured_outputs.regex", regex, outputs.regex),
            ("structured_outputs.choice", choice, outputs.choice),
            ("structured_outputs.grammar", lark, outputs.grammar),
            ("guided_json", of_schema, self.guided_json),
            ("guided_regex", regex, self.guided_regex),
            ("guided_choice", choice, self.guided_choice),
            ("guided_grammar", lark, self.guided_grammar),
        ]
        made = [(name, make(value, _field(name))) for name, make, value in asked if value is not None]
        bound = [(name, grammar) for name, grammar in made if grammar]
        if len(bound) > 1:
            (first, _), (second, _) = bound[:2]
            raise bad_request(f"{first} and {second} both bind the answer", _field(second), "invalid_value")
        return (_field(bound[0][0]), bound[0][1]) if bound else ("", "")


def _field(name: str) -> str:
    """Of the body, in which it is."""
    return name.partition(".")[0]


def of_format(wanted: PlainFormat | ObjectFormat | SchemaFormat | FlatSchemaFormat, param: str) -> str:
    """Empty for plain text."""
    if isinstance(wanted, PlainFormat):
        return ""
    if isinstance(wanted, ObjectFormat):
        return json_schema({"type": "object"}, param)
    return json_schema((wanted.json_schema if isinstance(wanted, SchemaFormat) else wanted).schema_, param)


def of_schema(schema: Schema | str, param: str) -> str:
    """vLLM takes a schema as text too."""
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise bad_request(f"{param}: the schema should be a JSON object", param, "invalid_value")
    return json_schema(value, param)
