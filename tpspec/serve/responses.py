"""The body of /v1/responses: OpenAI's later way to ask for a chat, without the conversations it keeps for its clients.

Nothing is kept here, so what refers to an earlier response is refused, and `store` is answered as false. Must not know
HTTP routes, or how an answer is worded (response_reply.py).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, field_validator, model_validator

from tpspec.serve.chats import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Arguments,
    Choice,
    Function,
    FunctionCall,
    MadeCall,
    Message,
    Name,
    ReasoningEffort,
    Said,
    TemplateOptions,
    chat_of,
    no_two_alike,
    toolbox_of,
    with_effort,
)
from tpspec.serve.constraints import TextOptions, of_format
from tpspec.serve.protocol import Body, Strict
from tpspec.serve.text import Chat
from tpspec.serve.tools import Toolbox

LOGPROBS = "message.output_text.logprobs"  # of what an answer may include


class InputMessage(Strict):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Said


class InputCall(Strict):
    type: Literal["function_call"]
    call_id: str
    name: Name
    arguments: Arguments


class InputResult(Strict):
    """What a function answered."""

    type: Literal["function_call_output"]
    call_id: str
    output: Said


class ReasoningText(Strict):
    type: Literal["reasoning_text"]
    text: str


class InputReasoning(Strict):
    """What was thought before the message or the call that follows. Of a summary, models have no use."""

    type: Literal["reasoning"]
    content: list[ReasoningText] = Field([])


class ReasoningOptions(Strict):
    """context: which thoughts of earlier turns are read; the chat template says so."""

    effort: ReasoningEffort | None = None
    mode: Literal["standard"] = "standard"
    context: Literal["auto"] = "auto"


class CacheOptions(Strict):
    """What is kept, and how long, is the cache's own matter."""

    prewarm: Literal[False] = False


class FunctionTool(Function):
    type: Literal["function"]


class NamedFunctionTool(Strict):
    type: Literal["function"]
    name: Name


def _kind_of(item: Any) -> str:
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", "")
    return "message" if kind is None else str(kind)


def _checked(tools: list[FunctionTool]) -> list[FunctionTool]:
    no_two_alike([tool.name for tool in tools])
    return tools


Item = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputCall, Tag("function_call")]
    | Annotated[InputResult, Tag("function_call_output")]
    | Annotated[InputReasoning, Tag("reasoning")],
    Discriminator(
        _kind_of,
        custom_error_type="unknown_item",
        custom_error_message="Input should be a message, function_call, function_call_output or reasoning, by its type",
    ),
]
Items = Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES)]


class ResponsesBody(Body):
    refused = (
        *("previous_response_id", "conversation", "prompt", "background", "top_logprobs"),
        *("max_tool_calls", "context_management", "previous_input_messages", "enable_response_messages"),
    )
    asks_in = "input"
    effort_in: ClassVar[str] = "reasoning"

    input: Items
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    chat_template_kwargs: TemplateOptions = Field({})
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS), AfterValidator(_checked)] = Field([])
    tool_choice: Choice | NamedFunctionTool = "auto"
    parallel_tool_calls: bool = True
    reasoning: ReasoningOptions = ReasoningOptions()
    text: TextOptions = TextOptions()
    truncation: Literal["disabled"] = "disabled"
    store: bool = False
    include: list[str] = Field([])
    prompt_cache_options: CacheOptions = CacheOptions()
    metadata: Annotated[dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=16)] = Field({})

    @field_validator("input", mode="before", json_schema_input_type=str | Items)
    @classmethod
    def _text_is_a_message(cls, value: object) -> object:
        return [{"role": "user", "content": value}] if isinstance(value, str) else value

    @field_validator("include")
    @classmethod
    def _no_logprobs(cls, value: list[str]) -> list[str]:
        """Who asks for more than there is, of the rest, gets what there is."""
        if LOGPROBS in value:
            raise ValueError(f"{LOGPROBS} is not supported yet")
        return value

    @model_validator(mode="after")
    def _tools_can_be_chosen(self) -> ResponsesBody:
        self.toolbox  # noqa: B018  raises
        return self

    @property
    def limit(self) -> int | None:
        return self.max_output_tokens

    @property
    def limit_name(self) -> str:
        return "max_output_tokens"

    @property
    def num_logprobs(self) -> int | None:
        return None

    @property
    def bound(self) -> tuple[str, str]:
        bound, of_text = super().bound, of_format(self.text.format, "text")
        return ("text", of_text) if of_text and not bound[1] else bound

    @property
    def effort(self) -> ReasoningEffort | None:
        return self.reasoning.effort

    @property
    def chat(self) -> Chat:
        options = with_effort(self.chat_template_kwargs, self.effort)
        return chat_of(_messages(self.instructions, self.input), self.toolbox, True, options)

    @property
    def toolbox(self) -> Toolbox | None:
        choice = self.tool_choice
        named = None if isinstance(choice, str) else choice.name
        return toolbox_of(self.tools, choice, named, self.parallel_tool_calls)


NOTHING = Message(role="assistant", content="")


def _messages(instructions: str | None, items: list[Item]) -> list[Message]:
    """As a chat has them: thoughts and calls belong to the message of the assistant that had and made them."""
    messages = [Message(role="system", content=instructions)] if instructions else []
    for item in items:
        if isinstance(item, InputResult):
            messages.append(Message(role="tool", content=item.output, tool_call_id=item.call_id))
        elif isinstance(item, InputMessage) and item.role != "assistant":
            messages.append(Message(role=item.role, content=item.content))
        else:
            is_more = bool(messages) and messages[-1].role == "assistant" and _goes_on(messages[-1], item)
            messages.append(_with(messages.pop() if is_more else NOTHING, item))
    return messages


def _goes_on(message: Message, item: Item) -> bool:
    """Whether an item is of the same message of the assistant as those before it: thoughts, text, calls, in order."""
    if isinstance(item, InputCall):
        return True
    return not message.content and not message.tool_calls


def _with(message: Message, item: InputMessage | InputCall | InputReasoning) -> Message:
    if isinstance(item, InputMessage):
        return message.model_copy(update={"content": item.content})
    if isinstance(item, InputReasoning):
        thoughts = [message.reasoning_content, *(part.text for part in item.content)]
        return message.model_copy(update={"reasoning_content": "\n".join(filter(None, thoughts))})
    function = FunctionCall.model_construct(name=item.name, arguments=item.arguments)
    call = MadeCall.model_construct(id=item.call_id, type="function", function=function)
    return message.model_copy(update={"tool_calls": [*(message.tool_calls or ()), call]})
