"""What `test_document.py` does not see on a page: long runs, and losses that are all the same."""

from __future__ import annotations

from dataclasses import replace

from bitproof.builtin_cases.layouts.resume import fsdp_four_then_two
from bitproof.harness.report.html.losses import MAX_LOSSES, MAX_POINTS, LossBlock, losses


def described(make_result, reference: list[float], candidate: list[float]) -> LossBlock | None:
    sides = {"reference": reference, "candidate": candidate}
    hexadecimal = {side: [value.hex() for value in values] for side, values in sides.items()}
    return losses(make_result("c", losses=hexadecimal))


def test_without_losses_there_is_nothing_to_report(make_result):
    assert described(make_result, [], []) is None


def test_the_same_losses_are_said_to_be_the_same(make_result):
    found = described(make_result, [1.0, 1.0], [1.0, 1.0])
    assert found.sentence == "The same bits on both sides at all 2 steps."
    assert found.chart.apart is None
    assert found.chart.reference == found.chart.candidate


def test_a_single_step_has_no_chart(make_result):
    found = described(make_result, [1.0], [2.0])
    assert found.chart is None
    assert found.sentence.startswith("They differ at the only step, first at step 0: ")


def test_steps_count_from_the_first_that_is_compared(make_result):
    sides = {"reference": [(1.0).hex(), (1.0).hex()], "candidate": [(1.0).hex(), (2.0).hex()]}
    found = losses(replace(make_result("c", losses=sides), case=fsdp_four_then_two))
    assert "first at step 3: 0x1.0" in found.sentence and [row[0] for row in found.rows] == [2, 3]
    assert (found.chart.first, found.chart.last, found.chart.apart) == (2, 3, 314.0)


def test_a_long_run_is_cut_and_the_rest_counted(make_result):
    steps = 2 * MAX_POINTS + 1
    found = described(make_result, [float(step) for step in range(steps)], [0.0] * steps)
    assert len(found.rows) == MAX_LOSSES
    assert found.left_out == steps - MAX_LOSSES
    [line] = found.chart.reference
    assert len(line.split()) <= MAX_POINTS


def test_how_far_losses_lie_apart_is_reported_by_step_in_ulps_of_float32(make_result):
    one = 2.0**-23
    found = described(make_result, [1.0, 1.0, 1.0, -1.0], [1.0, 1.0 + one, 1.0 + 3 * one, 1.0])
    assert [(step, ulps) for step, ulps, _ in found.growth] == [(1, "1"), (2, "3"), (3, f"{2 * 0x3F800000:,}")]
    lengths = [length for _, _, length in found.growth]
    assert lengths == sorted(lengths) and lengths[-1] == 100


def test_losses_that_are_no_float32_or_not_finite_have_no_ulps(make_result):
    found = described(make_result, [1.0, 1.0, 1.0, 1.0], [2.0, 1.0 + 2.0**-40, float("inf"), 4.0])
    assert [ulps for _, ulps, _ in found.growth] == ["8,388,608", "", "", "16,777,216"]
    assert described(make_result, [1.0, 1.0], [1.0, 2.0]).growth == [], "one step shows no growth"
