"""The table of flights without sockets: what waits for a reader, what the lead is told, what ends when."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from tests.serve.conftest import HARMONY_TEMPLATE, reasoning_folder
from tpspec.comm.messages import Cancel, Report, Stats, Submit, ToLead
from tpspec.request import Delta, Sampling
from tpspec.serve.metrics import Metrics
from tpspec.serve.requests import BACKLOG, Ask, Exchange, Piece, Table
from tpspec.text import Text

ASK = Ask((5, 6), 200, Sampling(), frozenset({2}))


@pytest.fixture(scope="module")
def text(model_folder: Path) -> Text:
    return Text.load(model_folder)


@pytest.fixture
def sent() -> list[ToLead]:
    return []


@pytest.fixture
def table(sent: list[ToLead]) -> Table:
    return Table(Metrics("m"), sent.append)


def _say(table: Table, *deltas: Delta, running: int = 0) -> None:
    table.read(Report(list(deltas), Stats(running=running)))


def _collect(exchange: Exchange) -> list[Piece]:
    async def collect() -> list[Piece]:
        return [piece async for piece in exchange.pieces() if piece is not None]

    return asyncio.run(collect())


def test_pieces_that_nobody_reads_are_merged_and_none_is_lost(table: Table, text: Text) -> None:
    """Memory of a reader who lags is bounded; two sequences of one exchange keep their texts apart."""
    exchange = table.open([ASK, ASK], text)
    words = text.encode("abcdefghij")
    for i in range(100):
        _say(table, Delta(1, (words[i % 10],)), Delta(2, (words[9 - i % 10],)))
    _say(table, Delta(1, (2,), "stop"), Delta(2, (), "length"))
    pieces = _collect(exchange)
    assert len(pieces) == 2 * BACKLOG
    for index, expected in enumerate(("abcdefghij" * 10, "jihgfedcba" * 10)):
        mine = [piece for piece in pieces if piece.index == index]
        assert "".join(piece.text for piece in mine) == expected
        assert mine[-1].finish == ("stop", "length")[index]
    assert exchange.effort.tokens == 201
    assert len(table) == 0


def test_a_call_that_is_closed_cancels_what_still_runs_and_later_deltas_are_ignored(
    table: Table, text: Text, sent: list[ToLead]
) -> None:
    exchange = table.open([ASK, ASK], text)
    _say(table, Delta(1, (5, 2), "stop"))
    exchange.close()
    exchange.close()
    assert [type(message) for message in sent] == [Submit, Submit, Cancel]
    assert sent[-1] == Cancel(2)
    _say(table, Delta(2, (5,)), Delta(99, (5,)))
    assert len(table) == 0


def test_the_queue_is_what_the_engine_has_not_begun(table: Table, text: Text) -> None:
    exchanges = [table.open([ASK], text) for _ in range(3)]
    assert table.num_queued == 3
    _say(table, Delta(1, (5,)), running=1)
    assert table.num_queued == 2
    _say(table, running=3)  # the others are in prefill
    assert table.num_queued == 0
    for exchange in exchanges:
        exchange.close()
    assert table.num_queued == 0


def test_a_report_that_is_older_than_a_request_does_not_take_it_out_of_the_queue(table: Table, text: Text) -> None:
    """Rounds take long under load: all that came during one were let in beyond the limit, once it was reported."""
    table.open([ASK], text)
    _say(table, Delta(1, (5,)), running=1)
    for _ in range(3):
        table.open([ASK], text)
    _say(table, Delta(1, (5,)), running=1)
    assert table.num_queued == 3


def test_drafts_beyond_a_stop_string_are_not_counted_as_accepted(table: Table, text: Text) -> None:
    """Otherwise accepted exceeds what came out, and every ratio made of it is wrong."""
    exchange = table.open([Ask((5,), 99, Sampling(), frozenset(), stops=("b",))], text)
    tokens = tuple(text.encode("aXbXc"))
    _say(table, Delta(1, tokens, drafted=(1, 1, 1, 1), accepted=(1, 1, 1, 1)))
    assert (exchange.effort.tokens, exchange.effort.drafted, exchange.effort.accepted) == (3, 4, 3)


def test_a_sequence_that_ends_from_outside_gives_all_that_waits(
    table: Table, model_folder: Path, tmp_path: Path, text: Text
) -> None:
    """What was thought behind a beginning of a stop string was lost, and so was an echo before the first token."""
    harmony = Text.load(reasoning_folder(model_folder, tmp_path, HARMONY_TEMPLATE))
    said = "<|channel|>final<|message|>is it a b<|end|><|start|>assistant<|channel|>analysis<|message|>perhaps"
    thinks = table.open([replace(ASK, stops=("bus",), is_chat=True)], harmony)
    echoes = table.open([replace(ASK, prompt=text.encode("the bus"), echo="the bus")], text)
    _say(table, Delta(1, harmony.encode_rendered(said)))
    table.end_all("abort")
    pieces = _collect(thinks)
    assert "".join(piece.text for piece in pieces) == "is it a b"
    assert "".join(piece.thought for piece in pieces) == "perhaps"
    assert [(piece.text, piece.prompt, piece.finish) for piece in _collect(echoes)] == [
        ("the bus", text.encode("the bus"), "abort")
    ]


def test_an_answer_that_cannot_be_read_ends_alone(table: Table, text: Text, sent: list[ToLead]) -> None:
    """One argument of a call that our reader could not read took the server down, and every answer with it."""
    broken, sound = table.open([ASK], text), table.open([ASK], text)
    nothing = -1  # an id that no tokenizer spells
    _say(table, Delta(1, (nothing,)), Delta(2, text.encode("ab"), "length"))
    (last,) = _collect(broken)
    assert (last.finish, last.error) == ("error", "this answer could not be read: a fault of the server")
    assert sent[-1] == Cancel(1)
    assert [piece.text for piece in _collect(sound)] == ["ab"]
    assert len(table) == 0


def test_a_silent_engine_gives_pauses_to_fill(table: Table, text: Text) -> None:
    exchange = table.open([ASK], text)

    async def two() -> list[Piece | None]:
        pieces = exchange.pieces(0.01)
        first = await anext(pieces)
        table.end_all("error", "gone")
        return [first, await anext(pieces)]

    pause, last = asyncio.run(two())
    assert pause is None
    assert last == Piece(0, "", 0, "error", "gone", prompt=ASK.prompt)
