"""What a request's tokens cost, as vLLM's clients read it."""

from __future__ import annotations

from hypothesis import given, strategies as st

from tpspec.serve.effort import Effort


@st.composite
def rounds(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Tokens sent, drafted, accepted; a draft may have been cut by a stop string."""
    made = []
    for drafted in draw(st.lists(st.integers(0, 5), max_size=8)):
        accepted = draw(st.integers(0, drafted))
        made.append((accepted + draw(st.integers(0, 1)), drafted, accepted))
    return made


@given(rounds())
def test_the_histograms_say_what_the_totals_say(made: list[tuple[int, int, int]]) -> None:
    """aiperf drops the whole table when a length is off by one; rounds without a draft are no steps of vLLM's."""
    effort = Effort(sequences=1)
    for one in made:
        effort.add(*one)
    steps = [(drafted, accepted) for _, drafted, accepted in made if drafted]
    if not steps:
        assert effort.metrics() is None
        return
    shown = effort.metrics()["speculative_decoding"]
    histogram = shown["acceptance_histogram"]
    assert len(histogram) == shown["num_spec_tokens"] + 1 == max(drafted for drafted, _ in steps) + 1
    assert sum(histogram) == shown["num_spec_steps"] == len(steps)
    assert sum(j * count for j, count in enumerate(histogram)) == shown["num_accepted_draft_tokens"]
    assert shown["num_draft_tokens"] == sum(drafted for drafted, _ in steps)
    assert shown["mean_acceptance_length"] == 1 + shown["num_accepted_draft_tokens"] / len(steps)
    for length, counts in shown["acceptance_histogram_by_draft_length"].items():
        assert len(counts) == int(length) + 1
        assert sum(counts) == sum(drafted == int(length) for drafted, _ in steps)


def test_sequences_that_share_their_counts_have_no_histogram() -> None:
    effort = Effort(sequences=2)
    effort.add(3, 2, 2)
    assert effort.metrics() is None


def test_it_stands_in_the_answer_and_in_the_last_chunk_alone(front) -> None:
    front.engine.per_round = 4
    whole = front.complete(max_tokens=9)
    shown = whole["metrics"]["speculative_decoding"]
    assert shown["num_accepted_draft_tokens"] == whole["usage"]["speculation"]["accepted"]
    chunks = front.stream(prompt="the bus", max_tokens=9, stream_options={"include_usage": True})
    assert chunks[-1]["metrics"] == whole["metrics"]
    assert not any("metrics" in chunk for chunk in chunks[:-1])
    assert front.complete(n=2, max_tokens=9)["metrics"] is None
