"""A crowd that comes at once: in its own order, a few at a time, and whoever has no body goes by."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given
from hypothesis.strategies import integers, lists, sampled_from

from tpspec.serve.turnstile import AT_ONCE, Turnstile


class App:
    """Keeps who came, by the turn of the loop in which they did."""

    def __init__(self) -> None:
        self.turn, self.came = 0, list[tuple[int, int]]()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.came.append((self.turn, scope["number"]))

    async def count_turns(self) -> None:
        while True:
            self.turn += 1
            await asyncio.sleep(0)


def came(methods: list[str], cancelled: frozenset[int] = frozenset()) -> list[tuple[int, int]]:
    async def run() -> list[tuple[int, int]]:
        app = App()
        counting = asyncio.ensure_future(app.count_turns())
        turnstile: Any = Turnstile(app)
        scopes = [{"type": "http", "method": method, "number": number} for number, method in enumerate(methods)]
        crowd = [asyncio.ensure_future(turnstile(scope, None, None)) for scope in scopes]
        await asyncio.sleep(0)
        for number in cancelled:
            crowd[number].cancel()
        await asyncio.gather(*crowd, return_exceptions=True)
        counting.cancel()
        return app.came

    return asyncio.run(run())


@given(integers(0, 100))
def test_no_turn_of_the_loop_begins_more_than_a_few_requests(num: int) -> None:
    """256 requests at once kept /health, and every stream, waiting for 0.1 s."""
    seen = came(["POST"] * num)
    assert [number for _, number in seen] == list(range(num))
    turns = [turn for turn, _ in seen]
    assert max((turns.count(turn) for turn in turns), default=0) <= AT_ONCE


@given(lists(sampled_from(["GET", "POST"]), max_size=60))
def test_what_has_no_body_waits_for_nobody(methods: list[str]) -> None:
    """A probe of health stands behind no crowd."""
    seen = came(methods)
    first = min((turn for turn, _ in seen), default=0)
    assert {turn for turn, number in seen if methods[number] == "GET"} <= {first}
    assert sorted(number for _, number in seen) == list(range(len(methods)))


def test_one_that_is_cancelled_takes_nobodys_place() -> None:
    """A connection that is cut at a second SIGTERM."""
    gone = frozenset(range(0, 40, 3))
    assert [number for _, number in came(["POST"] * 40, gone)] == [number for number in range(40) if number not in gone]
