"""The output of /v1/responses, item by item: a stream ends with what a whole answer has."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings, strategies as st

from tests.serve.test_call_reader import FUNCTIONS, HERMES, LLAMA, PARTS
from tpspec.serve.answers import Piece
from tpspec.serve.call_formats import Format
from tpspec.serve.effort import Effort
from tpspec.serve.response_reply import ResponseReply
from tpspec.serve.responses import ResponsesBody
from tpspec.serve.tools import Calling, CallReader

BODY = ResponsesBody.model_validate({"input": "a"})


def read(parts: list[str], form: Format) -> list[Piece]:
    reader, pieces = CallReader(Calling(form, FUNCTIONS)), list[Piece]()
    for part in parts:
        text, calls = reader.feed(part)
        pieces.append(Piece(0, text, asides=[*calls]))
    pieces.append(Piece(0, reader.flush(), finish="stop"))
    return pieces


def merged(pieces: list[Piece]) -> Piece:
    one = Piece(0)
    for piece in pieces:
        one.absorb(piece)
    return one


def items(response: dict[str, Any]) -> list[Any]:
    """What was thought, said and called, in order."""
    return [
        (item["name"], json.loads(item["arguments"]))
        if item["type"] == "function_call"
        else (item["type"], item["content"][0]["text"])
        for item in response["output"]
    ]


def whole(pieces: list[Piece]) -> list[Any]:
    return items(ResponseReply(BODY, "m", 1).whole([merged(pieces)], Effort()))


def streamed(pieces: list[Piece]) -> list[Any]:
    reply = ResponseReply(BODY, "m", 1)
    events = [event for piece in pieces for event in reply.part(piece, Effort())]
    order = [(event["type"], event["output_index"]) for event in events if "output_item" in event["type"]]
    assert order == [(f"response.output_item.{when}", i) for i in range(len(order) // 2) for when in ("added", "done")]
    done = {event["output_index"]: event["item"] for event in events if event["type"] == "response.output_item.done"}
    last = items(reply.end(Effort())[0]["response"])
    assert items({"output": [done[i] for i in range(len(done))]}) == last
    return last


def test_what_is_said_after_a_call_stands_after_it() -> None:
    """Stands against a whole answer that has all text first, and a stream of it that has the call first."""
    pieces = read(['<tool_call>{"name": "look", "arguments": {}}</tool_call> Done.'], HERMES)
    assert whole(pieces) == streamed(pieces) == [("look", {}), ("message", " Done.")]


def test_a_message_closes_before_a_call_and_what_is_said_after_that_is_another() -> None:
    """Stands against clients that keep items in the order in which they close, as Codex does: all text was one message,
    open to the end, so that what was said before a call stood after it in the next request."""
    pieces = read(['I look.\n<tool_call>{"name": "look", "arguments": {}}</tool_call> ', "Done."], HERMES)
    assert whole(pieces) == streamed(pieces) == [("message", "I look."), ("look", {}), ("message", " Done.")]


@settings(max_examples=200, deadline=None)
@given(parts=st.lists(st.sampled_from(PARTS), max_size=8), data=st.data(), form=st.sampled_from([HERMES, LLAMA]))
def test_how_an_answer_is_cut_changes_none_of_its_items(parts: list[str], data: st.DataObject, form: Format) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = read([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)], form)
    half = data.draw(st.integers(0, len(pieces) - 1))  # a slow reader gets what came meanwhile as one
    slow = [merged(pieces[:half]), merged(pieces[half:])]
    assert whole(read([text], form)) == whole(pieces) == streamed(pieces) == streamed(slow)
