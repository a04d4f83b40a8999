"""Frames of random bytes, and frames of ours with a byte changed, on every channel: refused or dropped, and by name."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing, suppress

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, example, given, settings, strategies as st

from tpspec.comm.channel import FollowerSocketChannel, LeadSocketChannel, endpoint
from tpspec.comm.draft_link import DrafterDraftLink, LeadDraftLink
from tpspec.comm.messages import (
    MALFORMED,
    Draft,
    Drafts,
    News,
    Outcome,
    Outcomes,
    Report,
    Stats,
    Submit,
    ToFrontend,
    ToLead,
)
from tpspec.errors import WorldFailure
from tpspec.request import Delta, Request, Sampling
from tpspec.tokens import Branch, Draws, TokenTree

TREE = TokenTree.chain([3, 4], [Draws((3,), (1.0,)), None])
OURS = [
    msgspec.msgpack.encode(message)
    for message in (
        Drafts((Draft(1, 5, TREE, False),), (2,), (Branch(1, 5, (3,), (4,), (0.5,)),)),
        Outcomes((Outcome(1, 0, (3, 4), 2, 4, Sampling(temperature=0.5, logit_bias={3: 1.0})),), (9,)),
        News(3, (Request(1, (3, 4), 5),), (2,), None, {"rows": 7}, None, {1: TokenTree.chain([5])}),
        Submit(Request(1, (3, 4), 5, stop_ids=frozenset({2}))),
        Report([Delta(1, (3,), "stop")], Stats(rounds=4)),
    )
]
HUGE = [b"\xdd\xff\xff\xff\xff", b"\x81\xa6rounds\xdf\xff\xff\xff\xff", b"\x91" * 100_000, b"\xc6\xff\xff\xff\xff"]


@st.composite
def spoilt(draw: st.DrawFn) -> bytes:
    frame = bytearray(draw(st.sampled_from(OURS)))
    for at in draw(st.lists(st.integers(0, len(frame) - 1), max_size=3)):
        frame[at] = draw(st.integers(0, 255))
    return bytes(frame[: draw(st.integers(0, len(frame)))] if draw(st.booleans()) else frame)


Hearing = tuple[Callable[[bytes], object], Callable[[], object]]


@pytest.fixture(params=["lead of a drafter", "drafter", "follower"])
def hearing(request: pytest.FixtureRequest) -> Iterator[Hearing]:
    """What sends a frame to one end of a channel, and what that end then hears."""
    if request.param == "follower":
        with closing(LeadSocketChannel(1, 5)) as lead:
            follower = FollowerSocketChannel(endpoint(lead.folder, 0), 5, os.getpid())
            lead.meet()
            yield lead.send, lambda: follower.share(None)
            follower.close()
        return
    context, folder = zmq.Context(), LeadDraftLink()
    sender = context.socket(zmq.DEALER)
    if request.param == "lead of a drafter":
        end, hear = folder, lambda: folder.receive(5)
        sender.connect(folder.endpoint)
    else:
        where = f"{folder.endpoint}-of-a-lead"  # beside it, for its private folder alone
        sender.bind(where)
        end = drafter = DrafterDraftLink(where)
        hear = lambda: drafter.receive(5)  # noqa: E731
    yield sender.send, hear
    end.close()
    sender.close()
    context.destroy(linger=0)
    folder.close()


@settings(
    derandomize=True, deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(frame=spoilt() | st.binary(max_size=60))
@example(HUGE[0]).via("a list said to be endless")
@example(HUGE[1]).via("a map said to be endless")
@example(HUGE[2]).via("deep")
@example(HUGE[3]).via("bytes said to be endless")
def test_a_malformed_frame_is_never_more_than_a_refusal(hearing: Hearing, frame: bytes) -> None:
    """Against an error of the decoder's own that nobody expects, in a process that holds weights."""
    send, hear = hearing
    send(frame)
    with suppress(WorldFailure):
        hear()


@settings(derandomize=True, deadline=None, max_examples=150)
@given(frame=spoilt() | st.binary(max_size=60), kind=st.sampled_from([ToLead, ToFrontend]))
@example(HUGE[0], ToLead).via("a list said to be endless")
@example(HUGE[1], ToFrontend).via("a map said to be endless")
@example(HUGE[2], ToLead).via("deep")
def test_what_the_frontend_and_the_lead_cannot_read_is_malformed_by_name(frame: bytes, kind: object) -> None:
    """What both ends of their link refuse (test_link.py) is all that can be wrong with a frame."""
    with suppress(*MALFORMED):
        msgspec.msgpack.decode(frame, type=kind)
