"""How far another layout may move a tensor: bounds from samples, by values on disk."""

from __future__ import annotations

import pytest
import torch

from bitproof.harness.case import Case, Parallelism
from bitproof.harness.compare.part_layouts import LogicalTensor
from bitproof.harness.errors import RecordingError
from bitproof.harness.powers.two_layouts.regrouping import (
    FEWEST_UNITS,
    measure_in_float64,
    measure_layouts,
    student_quantile,
)
from tests.harness.forging import make_recording, vouch

CASE = Case(
    name="mine", family="mine", reference="a:b", candidate="a:c", steps=1, parallelism=Parallelism(world_size=2, ep=1)
)
OTHER_SUMS = [{"phase": "backward", "what": "sum", "ranks": "0,1", "operator": "all_reduce", "backwards": 1}]
EPS = torch.finfo(torch.float32).eps


def moved(kind: str, factor: float):
    """A change of a kind's tensors by a factor on all ranks."""
    return lambda key, x: x * factor if key.kind == kind else x


@pytest.fixture
def measured(tmp_path):
    """Hold a changed candidate against samples of which the parameter was moved by so much."""

    def measure(change, *samples: float, apart: tuple[LogicalTensor, ...] = ()):
        reference = make_recording(tmp_path / "reference", CASE)
        candidate = make_recording(tmp_path / "candidate", CASE, change)
        vouch(candidate, meetings=OTHER_SUMS)
        folders = [
            make_recording(tmp_path / f"sample{i}", CASE, moved("param", factor)) for i, factor in enumerate(samples)
        ]
        return measure_layouts(reference, candidate, folders, apart)

    return measure


@pytest.mark.parametrize(
    ("degrees", "quantiles"),
    [
        (1, (6.314, 12.706, 63.657, 636.619)),
        (2, (2.920, 4.303, 9.925, 31.599)),
        (3, (2.353, 3.182, 5.841, 12.924)),
        (4, (2.132, 2.776, 4.604, 8.610)),
        (11, (1.796, 2.201, 3.106, 4.437)),
        (12, (1.782, 2.179, 3.055, 4.318)),
    ],
)
def test_students_quantiles_are_those_of_the_tables(degrees, quantiles):
    for level, quantile in zip((0.1, 0.05, 0.01, 0.001), quantiles, strict=True):
        assert student_quantile(level, degrees) == pytest.approx(quantile, rel=1e-3)


def test_more_samples_give_a_narrower_bound_that_a_small_defect_does_not_fit_in(measured):
    """Eight spreads: a bound is 12 of three samples, and 4 of twelve."""
    defect, samples = moved("param", 1 + 8 * 16 * EPS), (1 + 16 * EPS, 1 - 16 * EPS, 1 + 16 * EPS)
    few, many = measured(defect, *samples), measured(defect, *samples * 4)
    assert few.is_within and few.near == 1
    assert not many.is_within and many.beyond == 1 and many.samples == 12
    usual = measured(moved("param", 1 - 2 * 16 * EPS), *samples)
    assert usual.is_within and usual.near == 0


def test_one_unit_in_the_last_place_is_never_near_its_bound(measured):
    assert measured(moved("param", 1 + EPS), 1.0, 1.0, 1.0).near == 0
    assert measured(moved("param", 1 + 3 * EPS), 1.0, 1.0, 1.0).near == 1


def test_an_error_of_the_samples_size_is_within_its_bound_and_one_far_beyond_is_not(measured):
    near = measured(moved("param", 1 + 16 * EPS), 1 + 16 * EPS, 1 - 16 * EPS, 1.0)
    assert near.is_within and near.beyond == 0
    row = near.rows[0]
    assert (row.kind, row.name, row.step) == ("param", "w", 0) and 0 < row.used < 0.2
    # Four tensors may differ, all but the loss: each may be wrong with a chance of a quarter of a hundredth, half of
    # that for the bound of more samples.
    spread = 16 * EPS * (2 / 3) ** 0.5
    assert row.bound == pytest.approx(student_quantile(0.01 / 2 / 4, 3) * spread, rel=1e-3)
    far = measured(moved("param", 1.001), 1 + 16 * EPS, 1 - 16 * EPS, 1.0)
    assert not far.is_within and far.beyond == 1 and far.rows[0].is_beyond


def test_a_tensor_that_no_sample_moves_may_move_by_some_units_in_the_last_place(measured):
    found = measured(moved("param", 1 + EPS), 1.0, 1.0, 1.0)
    assert found.is_within and found.rows[0].bound == pytest.approx(FEWEST_UNITS * EPS)
    assert not measured(moved("param", 1 + 8 * EPS), 1.0, 1.0, 1.0).is_within


def test_a_loss_before_the_first_other_sum_has_no_bound(measured):
    found = measured(moved("loss", 1 + EPS), 1.0, 1.0, 1.0)
    assert found.beyond == 1 and found.rows[0].bound is None and (found.exact, found.regrouped) == (1, 4)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_no_number_states_are_beyond_any_bound(measured, value):
    found = measured(lambda key, x: x + value if key.kind == "param" else x, 1.1, 1.2, 1.3)
    assert found.beyond == 1 and found.rows[0].error is None


def test_integers_have_no_rounding(measured):
    found = measured(lambda key, x: x + 1 if key.kind == "buffer" else x, 1.0, 1.0, 1.0)
    assert found.beyond == 1 and found.rows[0].kind == "buffer"


def test_zeros_of_other_signs_are_reported_as_a_difference(measured):
    found = measured(lambda key, x: -x if key.kind == "optimizer" else x, 1.0, 1.0, 1.0)
    assert [row.kind for row in found.rows] == ["optimizer"] and found.beyond == 1


def test_one_rank_of_the_candidate_that_differs_counts_though_the_other_agrees(measured):
    found = measured(lambda key, x: x * 2 if (key.kind, key.rank) == ("param", 1) else x, 1.0, 1.0, 1.0)
    assert found.beyond == 1


def test_replicas_that_do_not_agree_have_no_bound_however_near_they_are(measured):
    of = LogicalTensor(0, "param", "w")
    close = measured(
        lambda key, x: x * (1 + 4 * EPS) if (key.kind, key.rank) == ("param", 1) else x, *[1 + 16 * EPS] * 3
    )
    assert close.is_within and close.rows[0].rank == 1
    apart = measured(moved("grad", 1 + EPS), *[1 + 16 * EPS] * 3, apart=(of,))
    assert not apart.is_within and apart.beyond == 1
    row = apart.rows[0]
    assert (row.kind, row.bound, row.error, row.apart) == ("param", None, 0, True), "before a gradient, which is close"


def test_values_that_were_not_recorded_are_refused(tmp_path, measured):
    measured(moved("param", 1.0), 1.0, 1.0, 1.0)
    forged = tmp_path / "forged"
    make_recording(forged, CASE, moved("param", 1.5))
    (tmp_path / "sample0" / "values" / "rank0.safetensors").write_bytes(
        (forged / "values" / "rank0.safetensors").read_bytes()
    )
    with pytest.raises(RecordingError, match="damaged"):
        measure_layouts(tmp_path / "reference", tmp_path / "candidate", [tmp_path / "sample0"])


@pytest.fixture
def measured_in_float64(tmp_path):
    """Hold a candidate whose parameter is off by `defect` against runs in float64; in plain runs it rounds as well."""

    def measure(defect: float, rounding: float = EPS, *, candidate_rounds: float = 1.0, apart=()):
        def run(name: str, *factors: float, wide: bool = False):
            def change(key, x):
                own = x.double() if wide and x.is_floating_point() else x
                for factor in factors:
                    own = own * (1 + factor) if key.kind == "param" else own
                return own

            return make_recording(tmp_path / name, CASE, change)

        plain = run("a", 0.0), run("b", defect, candidate_rounds * rounding), [run(f"s{i}", rounding) for i in range(3)]
        small = rounding * 2.0**-29
        wide = run("A", 0.0, wide=True), run("B", defect, small, wide=True), [run("S", small, wide=True)]
        return measure_in_float64(wide, plain, apart)

    return measure


@pytest.mark.parametrize("defect", [1e-4, -1e-6, 3e-7])
def test_what_stays_in_float64_is_a_defect_and_named_with_its_size(measured_in_float64, defect):
    found = measured_in_float64(defect)
    assert found.beyond == 1 and found.shows_defect
    (row,) = found.rows
    assert (row.step, row.kind, row.name) == (0, "param", "w")
    assert row.error == pytest.approx(abs(defect), rel=1e-6) and row.bound < 2e-11


@pytest.mark.parametrize("rounding", [EPS, -EPS, 1e-5, 1e-3])
def test_what_shrinks_as_rounding_does_is_none_however_large_it_was(measured_in_float64, rounding):
    found = measured_in_float64(0.0, rounding)
    assert found.beyond == 0 and not found.shows_defect and found.less_accurate is None
    assert found.rows[0].used < 1e-3


def test_a_side_that_rounds_much_more_than_four_orders_do_is_less_accurate(measured_in_float64):
    assert measured_in_float64(0.0, 16 * EPS, candidate_rounds=3.0).less_accurate is None
    found = measured_in_float64(0.0, 16 * EPS, candidate_rounds=20.0)
    assert found.beyond == 0 and found.less_accurate > 10


def test_a_tensor_whose_replicas_differ_has_no_second_test(measured_in_float64):
    found = measured_in_float64(1e-4, apart=(LogicalTensor(0, "param", "w"),))
    assert found.rows == [] and found.beyond == 0
