"""The body of /v1/chat/completions: messages, tools, and what a chat template is given of them.

Must not know the model's template, HTTP routes or how calls are read back. A tool is a name and a JSON schema, which is
passed on and bounded in size and depth; nothing here asks whether it makes sense.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from tpspec.serve.arguments import MAX_DEPTH, as_json, is_deep
from tpspec.serve.protocol import MAX_LOGPROBS, ChoicesBody, Strict
from tpspec.serve.text import Chat
from tpspec.serve.tools import Toolbox

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_TOOLS = 128
MAX_SCHEMA_CHARS = 64 << 10
MAX_DESCRIPTION_CHARS = 16 << 10
MAX_MESSAGES = 4096
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
ROLES = {"developer": "system"}  # OpenAI's later word for what templates know as system

Name = Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
OptionName = Annotated[str, Field(pattern="^[a-zA-Z][a-zA-Z0-9_]{0,63}$")]
Option = bool | Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | Annotated[str, Field(max_length=1024)]
TemplateOptions = Annotated[dict[OptionName, Option], Field(max_length=32)]


PartType = Literal["text", "input_text", "output_text"]


class TextPart(Strict):
    type: PartType
    text: str


def text_of(value: object) -> object:
    """The text of a list of parts; anything else as it is."""
    return "\n".join(map(_text_of_part, value)) if isinstance(value, list) else value


def arguments_of(value: object) -> dict[str, Any]:
    """The arguments of a call, which OpenAI's API writes as a string. Raises ValueError."""
    try:
        found = json.loads(value or "{}") if isinstance(value, str) else None
        if isinstance(found, dict) and as_json(found):
            return found
    except (ValueError, RecursionError):
        pass
    raise ValueError(f"Input should be a JSON object of at most {MAX_DEPTH} levels, written as a string")


TextOrParts = str | list[TextPart]
Said = Annotated[str, BeforeValidator(text_of, json_schema_input_type=TextOrParts)]
SaidOrNot = Annotated[str | None, BeforeValidator(text_of, json_schema_input_type=TextOrParts | None)]
Arguments = Annotated[dict[str, Any], BeforeValidator(arguments_of, json_schema_input_type=str)]


class FunctionCall(Strict):
    name: Name
    arguments: Arguments


class MadeCall(Strict):
    """A call that an earlier answer made."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: SaidOrNot = None
    reasoning_content: str | None = None
    name: str | None = None
    tool_calls: Annotated[list[MadeCall], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _something_is_said(self) -> Message:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls is allowed only in messages of the assistant")
        if self.reasoning_content and self.role != "assistant":
            raise ValueError("reasoning_content is allowed only in messages of the assistant")
        if self.content is None and not self.tool_calls and not self.reasoning_content:
            raise ValueError("content should be given")
        return self

    def for_template(self) -> dict[str, Any]:
        """What was thought goes by two names; that of harmony's template, which refuses it beside text and calls."""
        calls = [call.model_dump(exclude_none=True) for call in self.tool_calls or ()]
        rest = {"name": self.name, "tool_call_id": self.tool_call_id, "tool_calls": calls}
        message = {"role": ROLES.get(self.role, self.role), "content": self.content or ""}
        if thought := self.reasoning_content:
            message |= {"reasoning_content": thought, "thinking": "" if calls and self.content else thought}
        return message | {key: value for key, value in rest.items() if value}


class Function(Strict):
    name: Name
    description: str | None = Field(None, max_length=MAX_DESCRIPTION_CHARS)
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @field_validator("parameters")
    @classmethod
    def _schema_is_bounded(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if is_deep(value):
            raise ValueError(f"a schema should be at most {MAX_DEPTH} levels deep")
        if value is not None and len(as_json(value)) > MAX_SCHEMA_CHARS:
            raise ValueError(f"a schema should have at most {MAX_SCHEMA_CHARS} characters")
        return value


class Tool(Strict):
    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    name: Name


class NamedTool(Strict):
    type: Literal["function"]
    function: NamedFunction


def no_two_alike(names: list[str]) -> None:
    if len(set(names)) < len(names):
        raise ValueError("no two tools should have the same name")


def _checked(tools: list[Tool]) -> list[Tool]:
    no_two_alike([tool.function.name for tool in tools])
    return tools


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS), AfterValidator(_checked)]
Choice = Literal["none", "auto", "required"]
EFFORT, THINKING = "reasoning_effort", "enable_thinking"  # as chat templates call them
# With a title, or Python takes it, where it is optional, for another module's of the same words in another order.
ReasoningEffort = Annotated[
    Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"], Field(title="ReasoningEffort")
]  # of which a template may know some


class ChatBody(ChoicesBody):
    refused = ("echo", "add_special_tokens")
    asks_in = "messages"
    effort_in: ClassVar[str] = "reasoning_effort"

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    add_generation_prompt: bool = True
    chat_template_kwargs: TemplateOptions = Field({})
    tools: Tools = Field([])
    tool_choice: Choice | NamedTool = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: ReasoningEffort | None = None
    include_reasoning: bool = True
    verbosity: Literal["medium"] = "medium"
    modalities: list[Literal["text"]] = Field(["text"])
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS)

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @property
    def effort(self) -> ReasoningEffort | None:
        return self.reasoning_effort

    @property
    def chat(self) -> Chat:
        options = with_effort(self.chat_template_kwargs, self.effort)
        return chat_of(self.messages, self.toolbox, self.add_generation_prompt, options)

    @property
    def toolbox(self) -> Toolbox | None:
        choice = self.tool_choice
        named = None if isinstance(choice, str) else choice.function.name
        return toolbox_of([tool.function for tool in self.tools], choice, named, self.parallel_tool_calls)

    @model_validator(mode="after")
    def _alternatives_need_logprobs(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs is allowed only when logprobs is true")
        return self

    @model_validator(mode="after")
    def _tools_can_be_chosen(self) -> ChatBody:
        self.toolbox  # noqa: B018  raises
        return self


def with_effort(options: dict[str, Option], effort: ReasoningEffort | None) -> dict[str, Option]:
    """What a chat template is told of it: most know but whether there shall be thoughts at all."""
    thinking: dict[str, Option] = {THINKING: False} if effort == "none" else {}
    return options if effort is None else {**thinking, **options, EFFORT: effort}


def chat_of(messages: list[Message], toolbox: Toolbox | None, answer: bool, options: dict[str, Option]) -> Chat:
    shown = [] if toolbox is None else toolbox.shown
    return Chat([message.for_template() for message in messages], shown, answer, options)


def toolbox_of(functions: Sequence[Function], choice: object, named: str | None, parallel: bool) -> Toolbox | None:
    """None where nothing is to be called. Raises ValueError when the choice does not fit the functions."""
    schemas = {one.name: one.parameters or NO_PARAMETERS for one in functions}
    if choice in ("none", "auto") and (choice == "none" or not functions):
        return None
    if named is not None and named not in schemas:
        raise ValueError(f"tool_choice names {named}, which is none of the tools")
    if not functions:
        raise ValueError(f"tool_choice is {choice}, and no tools are given")
    return Toolbox(
        shown=[_shown(one.name, one.description, schemas[one.name]) for one in functions],
        schemas=schemas if named is None else {named: schemas[named]},
        strict=frozenset(one.name for one in functions if one.strict),
        must=choice != "auto",
        parallel=parallel and named is None,
    )


def _shown(name: str, description: str | None, parameters: dict[str, Any]) -> dict[str, Any]:
    described = {} if description is None else {"description": description}
    return {"type": "function", "function": {"name": name, **described, "parameters": parameters}}


def _text_of_part(part: object) -> str:
    if not isinstance(part, dict) or part.get("type") not in get_args(PartType):
        raise ValueError("Only text parts are supported, as {type: text, text: ...}")
    text = part.get("text")
    if not isinstance(text, str):
        raise ValueError("The text of a part should be a string")
    return text
