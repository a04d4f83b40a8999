"""The bodies of /v1/completions and /v1/chat/completions: what may stand in them, and how a bad one is described.

Turns bytes into checked fields and fields into Sampling. Must not know the model, its vocabulary, or HTTP routes.
Strict on purpose: NaN, true as 1, "2" as 2, duplicate keys and lone surrogates are faults of the client, told as such.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, ClassVar, Literal, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from tpspec.request import Sampling
from tpspec.serve.errors import ApiError, bad_request, unsupported

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
    *("prompt_logprobs", "suffix", "audio", "documents"),
    *("tools", "functions", "function_call", "response_format", "structured_outputs", "guided_json", "guided_regex"),
    *("guided_choice", "guided_grammar", "use_beam_search", "prompt_embeds", "truncate_prompt_tokens", "bad_words"),
    *("allowed_token_ids", "chat_template", "chat_template_kwargs"),
    *("continue_final_message", "logits_processors", "prediction"),
)

Bias = Annotated[float, Field(ge=-100, le=100)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 32)]
Prompt = str | list[int]


class Strict(BaseModel):
    """Unknown fields are accepted and ignored, as OpenAI and vLLM do: gateways and benchmarks send their own.

    refused: fields that change the output elsewhere, beyond those that nothing here supports.
    """

    refused: ClassVar[tuple[str, ...]] = ()

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)


B = TypeVar("B", bound=Strict)


class StreamOptions(Strict):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class Body(Strict):
    """What both kinds of request share."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    max_completion_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    seed: int | None = Field(None, ge=-SEED_SPAN, lt=SEED_SPAN)
    stop: list[str] = []
    stop_token_ids: list[TokenId] = Field([], max_length=1024)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, lt=1 << 31)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0, le=100)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: dict[str, Bias] = Field({}, max_length=4096)
    min_tokens: int = Field(0, ge=0, lt=1 << 31)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    return_token_ids: bool = False
    skip_special_tokens: bool = True
    cache_salt: str | None = Field(None, max_length=1024)
    num_drafts: int | None = Field(None, ge=0, le=1024)  # ours: draft length of this request alone
    stream: bool = False
    stream_options: StreamOptions | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _stop_is_a_list(cls, value: object) -> object:
        stops = [value] if isinstance(value, str) else value
        if not isinstance(stops, list) or not all(isinstance(s, str) and 0 < len(s) <= MAX_STOP_CHARS for s in stops):
            raise ValueError(f"Input should be a string of 1 to {MAX_STOP_CHARS} characters, or a list of them")
        if len(stops) > MAX_STOPS:
            raise ValueError(f"List should have at most {MAX_STOPS} items")
        return stops

    @field_validator("logit_bias")
    @classmethod
    def _bias_keys_are_ids(cls, value: dict[str, float]) -> dict[str, float]:
        if not all(key.isascii() and key.isdigit() and len(key) <= 10 for key in value):
            raise ValueError("Keys should be token ids, written as decimal strings")
        return value

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Body:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is allowed only when stream is true")
        return self

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def biases(self) -> dict[int, float]:
        return {int(key): bias for key, bias in self.logit_bias.items()}

    @property
    def num_logprobs(self) -> int | None:
        """How many alternatives are told beside each token; None: nothing is."""
        raise NotImplementedError

    def sampling(self, seed: int, stop_ids: frozenset[int]) -> Sampling:
        return Sampling(
            temperature=self.temperature,
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


class CompletionBody(Body):
    """max_tokens may be 0 with echo: to rate a prompt is all that is asked."""

    refused = ("top_logprobs",)

    prompt: list[Prompt]
    max_tokens: int | None = Field(None, ge=0, lt=1 << 31)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @field_validator("logprobs", mode="before")
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
            raise ValueError(f"prompts times n should be at most {MAX_PROMPTS}")
        return self

    @field_validator("prompt", mode="plain")
    @classmethod
    def _prompts(cls, value: object) -> list[Prompt]:
        prompts = _as_prompts(value)
        if any(len(prompt) == 0 for prompt in prompts):
            raise ValueError("Prompt should not be empty")
        if len(prompts) > MAX_PROMPTS:
            raise ValueError(f"List should have at most {MAX_PROMPTS} prompts")
        return prompts


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str

    @field_validator("content", mode="before")
    @classmethod
    def _text_of(cls, value: object) -> object:
        return "\n".join(map(_text_of_part, value)) if isinstance(value, list) else value


class ChatBody(Body):
    refused = ("echo",)

    messages: list[Message] = Field(min_length=1, max_length=4096)
    add_generation_prompt: bool = True
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS)

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @model_validator(mode="after")
    def _alternatives_need_logprobs(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs is allowed only when logprobs is true")
        return self


def for_template(messages: list[Message]) -> list[dict[str, str]]:
    """As chat templates read them: they know `system`, and `developer` is OpenAI's later word for it."""
    roles: dict[str, str] = {"developer": "system"}
    return [{"role": roles.get(m.role, m.role), "content": m.content} for m in messages]


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
        raise _describe(error) from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("an object has the same key twice")
    return fields


def _refuse_unsupported(fields: dict[str, Any], refused: tuple[str, ...]) -> None:
    for name in (*UNSUPPORTED, *refused):
        if not _is_neutral(name, fields.get(name, False)):
            raise unsupported(name)
    best_of, tool_choice = fields.get("best_of", 1), fields.get("tool_choice", "none")
    if best_of != 1:
        raise unsupported("best_of")
    if tool_choice not in ("none", "auto"):
        raise unsupported("tool_choice")
    _refuse_tool_messages(fields.get("messages"))


def _is_neutral(name: str, value: object) -> bool:
    if name == "response_format":
        return value is False or (isinstance(value, dict) and value.get("type") == "text")
    return not value


def _refuse_tool_messages(messages: object) -> None:
    for message in messages if isinstance(messages, list) else []:
        if not isinstance(message, dict):
            continue
        if message.get("tool_calls") or message.get("function_call") or message.get("role") in ("tool", "function"):
            raise bad_request("messages of tools are not supported yet", "messages", "unsupported_parameter")


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


def _text_of_part(part: object) -> str:
    if not isinstance(part, dict) or part.get("type") not in ("text", "input_text"):
        raise ValueError("Only text parts are supported, as {type: text, text: ...}")
    text = part.get("text")
    if not isinstance(text, str):
        raise ValueError("The text of a part should be a string")
    return text


def _describe(error: ValidationError) -> ApiError:
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    lines = [_line(fault["loc"], fault["msg"]) for fault in faults[:MAX_FAULTS]]
    if len(faults) > MAX_FAULTS:
        lines.append(f"and {len(faults) - MAX_FAULTS} more")
    param = str(faults[0]["loc"][0]) if faults[0]["loc"] else None
    return bad_request("; ".join(lines), param, "invalid_value")


def _line(location: tuple[int | str, ...], message: str) -> str:
    where = ".".join(map(str, location))[:MAX_LOCATION_CHARS]
    what = message.removeprefix("Value error, ")
    return f"{where}: {what}" if where else what
