"""What the bodies of requests have in common, and that of /v1/completions; how a bad one is described.

Turns bytes into checked fields and fields into Sampling. Chats have a file of their own (chats.py), as have responses
(responses.py). Must not know the model, its vocabulary, or HTTP routes.
Strict on purpose: NaN, true as 1, "2" as 2, duplicate keys and lone surrogates are faults of the client, told as such.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NoReturn, TypeVar

from pydantic import Field, ValidationError, field_validator, model_validator

from tpspec.request import COLDEST, LEAST_PENALTY, MOST_PENALTY, Sampling
from tpspec.serve.constraints import Constraints, Shape
from tpspec.serve.errors import ApiError, bad_request, unsupported

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_CHOICES = 16
MAX_PROMPTS = 1024
MAX_STOPS = 4
MAX_STOP_CHARS = 1024
MAX_FAULTS = 8
MAX_LOGPROBS = 20  # vLLM's and OpenAI's limit
MAX_LOCATION_CHARS = 80
SEED_SPAN = 1 << 63
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

# Fields of OpenAI or vLLM that change the output. A neutral value is let through, any other is refused by name.
UNSUPPORTED = (
    *("prompt_logprobs", "suffix", "audio", "documents", "web_search_options", "moderation"),
    *("functions", "function_call", "use_beam_search", "prompt_embeds", "truncate_prompt_tokens", "bad_words"),
    *("allowed_token_ids", "chat_template", "return_tokens_as_token_ids", "repetition_detection"),
    *("continue_final_message", "logits_processors", "prediction"),
)
ASK_EMPTY = ("prompt_logprobs", "max_tool_calls", "web_search_options")  # for something, with 0 or {}, too

Bias = Annotated[float, Field(ge=-100, le=100)]
BiasedId = Annotated[str, Field(pattern="^[0-9]{1,10}$")]  # JSON has no other keys than strings
TokenId = Annotated[int, Field(ge=0, lt=1 << 32)]
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Stops = Annotated[list[Stop], Field(max_length=MAX_STOPS)]
Prompt = str | list[int]
Words = Annotated[str, Field(min_length=1)]
Ids = Annotated[list[TokenId], Field(min_length=1)]
Several = Field(min_length=1, max_length=MAX_PROMPTS)
Prompts = Words | Ids | Annotated[list[Words], Several] | Annotated[list[Ids], Several]


class Strict(Shape):
    """Unknown fields are accepted and ignored, as OpenAI and vLLM do: gateways and benchmarks send their own.

    refused: fields that change the output elsewhere, beyond those that nothing here supports.
    """

    refused: ClassVar[tuple[str, ...]] = ()


B = TypeVar("B", bound=Strict)


class StreamOptions(Strict):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class Body(Strict, Constraints):
    """What all requests for text share. asks_in: the field that is read to the model."""

    asks_in: ClassVar[str] = "prompt"
    default_tokens: ClassVar[int | None] = None

    model: str | None = None
    seed: int | None = Field(None, ge=-SEED_SPAN, lt=SEED_SPAN)
    stop: Stops = Field([])
    stop_token_ids: list[TokenId] = Field([], max_length=1024)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, lt=1 << 31)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, ge=LEAST_PENALTY, le=MOST_PENALTY)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: dict[BiasedId, Bias] = Field({}, max_length=4096)
    min_tokens: int = Field(0, ge=0, lt=1 << 31)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    cache_salt: str | None = Field(None, max_length=1024)
    num_drafts: int | None = Field(None, ge=0, le=1024)  # ours: draft length of this request alone
    stream: bool = False

    @field_validator("stop", mode="before", json_schema_input_type=Stop | Stops)
    @classmethod
    def _stop_is_a_list(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value

    @property
    def limit(self) -> int | None:
        """The most tokens that may be generated; None: default_tokens, or what there is room for."""
        raise NotImplementedError

    @property
    def limit_name(self) -> str:
        """The field that says so, or could."""
        raise NotImplementedError

    @property
    def num_choices(self) -> int:
        return 1

    @property
    def biases(self) -> dict[int, float]:
        return {int(key): bias for key, bias in self.logit_bias.items()}

    @property
    def num_logprobs(self) -> int | None:
        """How many alternatives are told beside each token; None: nothing is."""
        raise NotImplementedError

    def sampling(self, seed: int, stop_ids: frozenset[int]) -> Sampling:
        return Sampling(
            temperature=self.temperature if self.temperature >= COLDEST else 0.0,
            top_k=max(self.top_k, 0),
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.biases,
            min_tokens=self.min_tokens,
            withheld=stop_ids if self.min_tokens else frozenset(),
            seed=seed % SEED_SPAN,
        )


class ChoicesBody(Body):
    """What completions and chats share: several choices, and usage that is asked for."""

    max_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    max_completion_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    return_token_ids: bool = False
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> ChoicesBody:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is allowed only when stream is true")
        return self

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def limit_name(self) -> str:
        return "max_completion_tokens" if self.max_completion_tokens is not None else "max_tokens"

    @property
    def num_choices(self) -> int:
        return self.n


class CompletionBody(ChoicesBody):
    """max_tokens may be 0 with echo: to rate a prompt is all that is asked."""

    refused = ("top_logprobs", "tools", "chat_template_kwargs")
    default_tokens = 16  # OpenAI's

    prompt: list[Prompt]
    max_tokens: int | None = Field(None, ge=0, lt=1 << 31)
    echo: bool = False
    add_special_tokens: bool = True
    logprobs: NumLogprobs | None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @field_validator("logprobs", mode="before", json_schema_input_type=NumLogprobs | Literal[False] | None)
    @classmethod
    def _false_is_none(cls, value: object) -> object:
        return None if value is False else value

    @model_validator(mode="after")
    def _something_is_asked(self) -> CompletionBody:
        if self.limit == 0 and not self.echo:
            raise ValueError("max_tokens should be at least 1, or 0 with echo")
        return self

    @model_validator(mode="after")
    def _not_too_many(self) -> CompletionBody:
        if len(self.prompt) * self.n > MAX_PROMPTS:
            raise ValueError(f"n times prompts should be at most {MAX_PROMPTS}")
        return self

    @field_validator("prompt", mode="plain", json_schema_input_type=Prompts)
    @classmethod
    def _prompts(cls, value: object) -> list[Prompt]:
        prompts = _as_prompts(value)
        if any(len(prompt) == 0 for prompt in prompts):
            raise ValueError("Prompt should not be empty")
        if len(prompts) > MAX_PROMPTS:
            raise ValueError(f"List should have at most {MAX_PROMPTS} prompts")
        return prompts


def parse(raw: bytes) -> dict[str, Any]:
    """The JSON object in a body; null fields are dropped, since clients write null for 'not given'.

    Raises ApiError (400) for whatever is not one finite, UTF-8 JSON object without repeated keys.
    """
    try:
        value = json.loads(raw.decode(), parse_constant=_refuse_constant, object_pairs_hook=_unique)
        if SURROGATE.search(raw):
            json.dumps(value, ensure_ascii=False).encode()  # a lone one has no UTF-8
    except RecursionError:
        raise bad_request("the JSON body is nested too deeply", code="invalid_json") from None
    except UnicodeError:
        raise bad_request("the body is not valid UTF-8 text", code="invalid_json") from None
    except ValueError as error:
        raise bad_request(f"the body is not valid JSON: {str(error)[:200]}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise bad_request("the body should be a JSON object", code="invalid_json")
    return {key: field for key, field in value.items() if field is not None}


def check(kind: type[B], fields: dict[str, Any]) -> B:
    """Fields as a body of this kind. Raises ApiError (400) that names every faulty field, up to MAX_FAULTS."""
    _refuse_unsupported(fields, kind.refused)
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _describe(error, fields, kind) from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("an object has the same key twice")
    return fields


def _refuse_unsupported(fields: dict[str, Any], refused: tuple[str, ...]) -> None:
    for name in (*UNSUPPORTED, *refused):
        value = fields.get(name)
        if value or (name in ASK_EMPTY and value is not None and value is not False):
            raise unsupported(name)
    best_of = fields.get("best_of", 1)
    if best_of != 1 or best_of is True:
        raise unsupported("best_of")


def _as_prompts(value: object) -> list[Prompt]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        if _are_ids(value):
            return [value]
        if value and (all(isinstance(item, str) for item in value) or all(map(_are_ids, value))):
            return value
    raise ValueError("Input should be a string, a list of strings, token ids, or a list of lists of token ids")


def _are_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)  # bool is an int, but not an id


def _describe(error: ValidationError, fields: dict[str, Any], kind: type[Strict]) -> ApiError:
    """What is wrong with two fields together begins with the name of one of them."""
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    lines = [_line(_within(fields, fault["loc"], fault["type"]), fault["msg"]) for fault in faults[:MAX_FAULTS]]
    if len(faults) > MAX_FAULTS:
        lines.append(f"and {len(faults) - MAX_FAULTS} more")
    param = str(faults[0]["loc"][0]) if faults[0]["loc"] else lines[0].split()[0]
    return bad_request("; ".join(lines), param if param in kind.model_fields else None, "invalid_value")


def _within(fields: dict[str, Any], location: tuple[int | str, ...], fault: str) -> list[int | str]:
    """Where a fault of this type is in the body: pydantic also says which of several kinds it took a value for."""
    value: Any = fields
    path: list[int | str] = []
    for step in location:
        inside: dict[Any, Any] = dict(enumerate(value)) if isinstance(value, list) else value
        if isinstance(inside, dict) and step in inside:
            value = inside[step]
            path.append(step)
    return [*path, location[-1]] if fault == "missing" else path


def _line(location: Sequence[int | str], message: str) -> str:
    where = ".".join(map(str, location))[:MAX_LOCATION_CHARS]
    what = message.removeprefix("Value error, ")
    return f"{where}: {what}" if where else what
