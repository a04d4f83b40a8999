"""Constants fitted to rounds: found again where they are known, and honest where they cannot be."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tpspec.errors import UserError
from tpspec.topology.calibration import Calibration, Sample, fit
from tpspec.topology.cost import StepCost
from tpspec.topology.links import straight

ROW_BYTES, REDUCES = 3072, 56
TRUE = Calibration(
    weights_s=0.040,
    row_s=0.0021,
    link=straight(300, 0.8),
    draft_s=0.004,
    host_s=0.0015,
    reduces=REDUCES,
    row_bytes=ROW_BYTES,
)


def measured(rows: int, noise: random.Random | None = None, calibration: Calibration = TRUE) -> Sample:
    def blur() -> float:
        return 1 + (noise.gauss(0, 0.05) if noise else 0.0)

    step: StepCost = calibration.step()
    reduce_s = step.waiting_s(rows) * blur()
    compute_s = (calibration.weights_s + rows * calibration.row_s) * blur()
    return Sample(rows, compute_s + reduce_s, reduce_s, REDUCES, (rows - 1) * 0.004, rows - 1, 0.0015)


def test_exact_rounds_give_the_constants_back() -> None:
    """Against a fit that puts the rows' time into the weights, or the link's into either."""
    found = fit([measured(rows) for rows in (1, 3, 5, 9)], ROW_BYTES)
    assert (found.weights_s, found.row_s) == (pytest.approx(0.040), pytest.approx(0.0021))
    assert (found.draft_s, found.host_s, found.reduces) == (pytest.approx(0.004), pytest.approx(0.0015), REDUCES)
    assert found.link is not None
    for rows in (1, 4, 20):
        assert found.step().seconds(rows) == pytest.approx(TRUE.step().seconds(rows))


def test_noisy_rounds_predict_within_the_noise() -> None:
    """5% of noise on 40 rounds; a round length that was not measured within 5%. Fixed seed: no false alarm."""
    noise = random.Random(7)
    found = fit([measured(rows, noise) for rows in (1, 3, 5, 9) for _ in range(10)], ROW_BYTES)
    for rows in (2, 4, 7):
        assert found.step().seconds(rows) == pytest.approx(TRUE.step().seconds(rows), rel=0.05)


def test_an_emulated_link_takes_the_place_of_the_boxs_own() -> None:
    """Against predicting an emulated bus with gloo's time on top."""
    found = fit([measured(rows) for rows in (1, 5)], ROW_BYTES)
    step = found.step(straight(60, 1.0), dilation=20)
    assert step.waiting_s(1) == pytest.approx(REDUCES * 20 * (60e-6 + ROW_BYTES / 1e9))
    assert step.compute_s(1) == pytest.approx(found.step().compute_s(1))


def test_what_was_waited_beyond_an_emulated_link_is_skew() -> None:
    """Against a line through a link whose curve is known, and against losing the ranks' waiting for one another."""
    table, late_s = straight(60, 1.0), 30e-6
    emulated = replace(TRUE, link=replace(table, skew_s=late_s), dilation=4.0)
    found = fit([measured(rows, calibration=emulated) for rows in (1, 3, 5, 9)], ROW_BYTES, table, 4.0)
    assert found.link is not None
    assert found.link.skew_s == pytest.approx(late_s)
    assert found.step().seconds(7) == pytest.approx(emulated.step().seconds(7))


def test_context_costs_every_row_its_look() -> None:
    """Against a prediction for long prompts from rounds on short ones."""
    samples = [
        Sample(rows, 0.04 + rows * (0.002 + context * 1e-6), context=context)
        for rows in (1, 2, 9)
        for context in (50, 400)
    ]
    found = fit(samples, ROW_BYTES)
    assert (found.weights_s, found.row_s) == (pytest.approx(0.04), pytest.approx(0.002))
    assert found.look_s == pytest.approx(1e-6)
    assert found.step(context=1000).seconds(5) == pytest.approx(0.04 + 5 * 0.003)


def test_a_fit_to_scattered_rounds_is_not_a_fit_to_the_fast_ones() -> None:
    """Stands against errors relative to the measured times: half the rounds 1.5 times slower made 8% too little."""
    samples = [Sample(rows, slow * (0.02 + rows * 0.001)) for rows in (1, 5, 9) for slow in (0.8, 1.2)]
    assert fit(samples, ROW_BYTES).step().seconds(5) == pytest.approx(0.025)


def test_a_disturbance_is_no_property_of_the_rows_it_struck() -> None:
    """Stands against a price of rows that doubles when another process strikes a long round; the mean stays true."""
    struck = [Sample(9, 0.200), Sample(9, 0.150)]
    samples = [Sample(rows, 0.02 + rows * 0.001) for rows in (1, 2, 3, 5, 9) for _ in range(20)] + struck
    found = fit(samples, ROW_BYTES)
    assert found.row_s == pytest.approx(0.001, rel=0.2)
    mean_s = sum(found.step().seconds(sample.rows) for sample in samples) / len(samples)
    assert mean_s == pytest.approx(sum(sample.step_s for sample in samples) / len(samples), rel=0.01)


def test_one_rank_has_no_link() -> None:
    found = fit([Sample(1, 0.1), Sample(4, 0.13)], ROW_BYTES)
    assert (found.link, found.step().waiting_s(4), found.draft_s) == (None, 0.0, 0.0)
    assert found.step().seconds(2) == pytest.approx(0.11)


def test_no_constant_is_below_zero() -> None:
    """Against a fit to noise that predicts a round faster the more rows it has, or weights that take no time."""
    falling = fit([Sample(1, 0.11), Sample(8, 0.10)], ROW_BYTES)
    assert (falling.row_s, falling.weights_s) == (0.0, pytest.approx(0.105, abs=0.002))
    steep = fit([Sample(1, 0.01), Sample(8, 0.10)], ROW_BYTES)
    assert (steep.weights_s, steep.row_s) == (0.0, pytest.approx(0.0113, abs=0.0015))


def test_rounds_of_one_length_cannot_tell_weights_from_rows() -> None:
    with pytest.raises(UserError, match=r"rounds of \[1\] rows; should have at least two lengths"):
        fit([Sample(1, 0.1), Sample(1, 0.2)], ROW_BYTES)
