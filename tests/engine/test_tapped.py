"""Rows of the target on their way to a drafter in another process."""

from __future__ import annotations

import msgspec
import pytest
import torch
from hypothesis import given, strategies as st

from tpspec.comm.messages import Rows
from tpspec.engine.tapped import Tapped, tensor_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_arrive_bit_by_bit(dtype: torch.dtype) -> None:
    """bfloat16 has no type in numpy, and a head fed with rounded rows drafts worse without anybody noticing."""
    sent, tapped = torch.randn(3, 5).to(dtype), Tapped()
    tapped.add(0, sent)
    rows = tapped.unsent()
    assert rows is not None
    heard = msgspec.msgpack.decode(msgspec.msgpack.encode(rows), type=Rows)
    assert torch.equal(tensor_of(heard), sent)
    assert tapped.unsent() is None


def test_rows_do_not_keep_the_memory_they_came_in() -> None:
    """From a card they come into pinned memory, of which there is little. Stands against views of it that last as long
    as a text."""
    came, tapped = torch.ones(3, 5), Tapped()
    tapped.add(0, came)
    came.zero_()  # it has been given to others
    rows = tapped.unsent()
    assert rows is not None
    assert torch.equal(tensor_of(rows), torch.ones(3, 5))


def test_a_long_text_is_sent_in_pieces() -> None:
    """Of 100,000 tokens that others have read rows are 2 GB. Stands against one message of that, for which the lead
    does nothing else for seconds; and against a row that is larger than a message should be."""
    rows_NW, tapped, heard = torch.randn(10, 5), Tapped(), list[Rows]()
    tapped.add(0, rows_NW)
    for most in (60, 7, 1000):
        assert not tapped.is_sent
        heard += [rows] if (rows := tapped.unsent(most)) is not None else []
    assert tapped.is_sent
    assert [(rows.first, rows.count) for rows in heard] == [(0, 3), (3, 1), (4, 6)]
    assert torch.equal(torch.cat([tensor_of(rows) for rows in heard]), rows_NW)


@given(st.lists(st.tuples(st.integers(1, 4), st.booleans()), max_size=12), st.data())
def test_a_drafter_that_hears_everything_knows_the_latest_row_of_every_position(
    steps: list[tuple[int, bool]], data: st.DataObject
) -> None:
    """A preempted text is read anew from its beginning, and a drafter that is new is told everything again."""
    tapped, truth, known, stamp = Tapped(), list[float](), list[float](), 0.0
    for count, again in steps:
        start = data.draw(st.integers(0, len(truth))) if again else len(truth)
        stamp += 1
        truth[start:] = [stamp + i / 10 for i in range(count)]
        tapped.add(start, torch.tensor(truth[start:], dtype=torch.float64).unsqueeze(1))
        if data.draw(st.booleans()):
            tapped.num_sent, known = 0, []
        if (rows := tapped.unsent()) is not None:
            known[rows.first :] = tensor_of(rows).squeeze(1).tolist()
        assert known == truth
