"""From a checked body to what is asked of the engine: prompts as ids, limits, seeds. Refuses what this model cannot do.

Must not know HTTP routes, or what becomes of the answer.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tpspec.serve.answers import Ask
from tpspec.serve.arguments import Arguments
from tpspec.serve.call_formats import format_of
from tpspec.serve.chats import EFFORT, THINKING
from tpspec.serve.errors import bad_request
from tpspec.serve.reasoning import splitter_of
from tpspec.serve.text import encode, encode_chat, too_long
from tpspec.serve.tool_grammar import tool_grammar
from tpspec.serve.tools import Calling

if TYPE_CHECKING:
    from tpspec.serve.chats import ChatBody
    from tpspec.serve.protocol import Body, CompletionBody
    from tpspec.serve.responses import ResponsesBody
    from tpspec.serve.tools import Toolbox
    from tpspec.text import Text

Ids = tuple[int, ...]


def check_ids(field: str, ids: Any, text: Text) -> None:
    if ids and not 0 <= min(ids) <= max(ids) < text.vocab_size:
        raise bad_request(f"{field}: token ids should be 0 to {text.vocab_size - 1}", field, "invalid_value")


async def completion_asks(body: CompletionBody, text: Text, cache_tokens: int) -> list[Ask]:
    prompts = [await _prompt_ids(text, prompt, cache_tokens, body.add_special_tokens) for prompt in body.prompt]
    echoes = [_echo(text, prompt, body.skip_special_tokens) if body.echo else None for prompt in body.prompt]
    asked = zip(prompts, echoes, strict=True)
    made = [asks(body, text, prompt, cache_tokens, echo=echo, grammar=body.grammar) for prompt, echo in asked]
    return [ask for each in made for ask in each]


async def chat_asks(body: ChatBody | ResponsesBody, text: Text, cache_tokens: int) -> list[Ask]:
    prompt = await asyncio.to_thread(encode_chat, text, body.chat, cache_tokens - 1, body.asks_in)
    splitter, toolbox, (field, grammar) = splitter_of(text, prompt), body.toolbox, body.bound
    _check_effort(body, text, thinks=splitter is not None)
    calling = None if toolbox is None else _calling(toolbox, text)
    is_bound = bool(grammar) or (toolbox is not None and toolbox.must)
    if is_bound and splitter and (calling is None or not calling.format.is_addressed):
        prompt += text.encode_rendered(splitter.closing)  # what binds an answer knows no thoughts, and no headers
    if toolbox and calling and (is_bound or toolbox.strict):
        calling = replace(calling, lenient=False)
        thoughts = splitter.thoughts if splitter else ""
        answer = field, grammar
        grammar = await asyncio.to_thread(tool_grammar, toolbox, calling.format, text.added, answer, thoughts)
    return asks(body, text, prompt, cache_tokens, is_chat=True, calling=calling, grammar=grammar)


def asks(
    body: Body,
    text: Text,
    prompt: Ids,
    cache_tokens: int,
    *,
    echo: str | None = None,
    calling: Calling | None = None,
    is_chat: bool = False,
    grammar: str = "",
) -> list[Ask]:
    """One ask for each of n choices, with seeds that follow one another."""
    check_ids(body.asks_in, prompt, text)  # words that were added to a tokenizer need not be in the model
    max_tokens = _max_tokens(body, len(prompt), cache_tokens)
    if body.min_tokens > max_tokens:
        message = f"min_tokens is {body.min_tokens}; it should be at most {body.limit_name}, here {max_tokens}"
        raise bad_request(message, "min_tokens", "invalid_value")
    stop_ids = frozenset(body.stop_token_ids) | (frozenset() if body.ignore_eos else text.eos_ids)
    if body.min_tokens and len(stop_ids) >= text.vocab_size:
        raise bad_request("min_tokens leaves no token to draw: all of them are stop tokens", "min_tokens")
    seed = secrets.randbits(62) if body.seed is None else body.seed
    hides_calls = calling is not None and any(map(text.hides, calling.format.marks))
    return [
        Ask(
            prompt=prompt,
            max_tokens=max_tokens,
            sampling=body.sampling(seed + choice, stop_ids),
            stop_ids=stop_ids,
            stops=tuple(body.stop),
            skip_special=body.skip_special_tokens and not hides_calls,
            num_drafts=body.num_drafts,
            echo=echo,
            keeps_stop=body.include_stop_str_in_output,
            logprobs=body.num_logprobs,
            salt=body.cache_salt or "",
            grammar=grammar,
            calling=calling,
            is_chat=is_chat,
            choice=choice,
        )
        for choice in range(body.num_choices)
    ]


def _check_effort(body: ChatBody | ResponsesBody, text: Text, *, thinks: bool) -> None:
    """Raises ApiError where the chat template would not read it. thinks: whether the model does."""
    template = text.chat_template(tools=body.toolbox is not None)
    obeys_none = THINKING in template or not thinks
    if body.effort and EFFORT not in template and not (body.effort == "none" and obeys_none):
        message = (
            f"{body.effort_in}: the chat template of this model knows no effort; leave it out, or set what it knows in "
            "chat_template_kwargs"
        )
        raise bad_request(message, body.effort_in, "unsupported_parameter")


def _calling(toolbox: Toolbox, text: Text) -> Calling:
    """How the calls of an answer are read, by what the chat template asks for. Raises ApiError where we cannot."""
    written = format_of(text.chat_template(tools=True))
    if written is None:
        message = "the chat template of this model has calls of tools written in a way this server does not read"
        raise bad_request(message, "tools", "chat_template_error")
    functions = {name: Arguments(schema) for name, schema in toolbox.schemas.items()}
    return Calling(written, functions, toolbox.parallel, must=toolbox.must)


async def _prompt_ids(text: Text, prompt: str | list[int], cache_tokens: int, special: bool) -> Ids:
    if isinstance(prompt, list):
        check_ids("prompt", prompt, text)
        return tuple(prompt)
    ids = await asyncio.to_thread(encode, text, prompt, cache_tokens - 1, special=special)
    if not ids:
        raise bad_request("the prompt has no tokens", "prompt", "invalid_value")
    return ids


def _echo(text: Text, prompt: str | list[int], skip_special: bool) -> str:
    return prompt if isinstance(prompt, str) else text.decode(prompt, skip_special)


def _max_tokens(body: Body, num_prompt: int, cache_tokens: int) -> int:
    """What was asked for, or the default, which yields to the room there is."""
    room = cache_tokens - num_prompt
    if room < 1:
        raise too_long(num_prompt, cache_tokens - 1, body.asks_in)
    if body.limit is None:
        return room if body.default_tokens is None else min(body.default_tokens, room)
    if body.limit > room:
        message = (
            f"{body.limit_name} is {body.limit} and the prompt has {num_prompt} tokens, {body.limit + num_prompt} "
            f"together; this server takes {cache_tokens}"
        )
        raise bad_request(message, body.limit_name, "context_length_exceeded")
    return body.limit
