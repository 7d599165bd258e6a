"""Systems that lay tensors out otherwise: which runs that takes, what it gives, and what each defect gives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bitproof.builtin_cases.layouts import two_layouts
from bitproof.harness.case import Case, Parallelism
from bitproof.harness.consistency import contradiction
from bitproof.harness.execute.launch import run_cases
from bitproof.harness.options import RunOptions
from bitproof.harness.records import CaseResult, Event, Verdict
from bitproof.harness.records.layout_bounds import FEWEST_SAMPLES, MOST_SAMPLES
from tests.hosts import one_host
from tests.sweeps import sweep

pytestmark = pytest.mark.ranks

LOOP, WRONG = "bitproof.builtin_cases.examples.mesh_loop", "tests.harness.execute.laid_out"
STAGES = "bitproof.builtin_cases.examples.pipelined"
ONE, TWO, THREE, FOUR = (Parallelism(world_size=ranks, ep=1) for ranks in (1, 2, 3, 4))


def case(name: str, reference: str, candidate: str, ranks: Parallelism = TWO, there: Parallelism = TWO, **more) -> Case:
    base = replace(two_layouts.ddp_fsdp, name=name, steps=2, parallelism=there, reference_parallelism=ranks)
    return replace(base, reference=reference, candidate=candidate, **more)


CASES = [
    case("equal", f"{LOOP}:ddp", f"{LOOP}:fsdp"),
    replace(case("unstated", f"{LOOP}:fsdp", f"{LOOP}:ddp"), reference_parallelism=None),
    case("fewer", f"{LOOP}:ddp", f"{LOOP}:fsdp", ONE, expected="CLOSE"),
    case("staged", f"{STAGES}:unstaged", f"{STAGES}:one_f_one_b", ONE, options={"layers": 4, "dim": 8}),
    case("experts", f"{LOOP}:ep", f"{LOOP}:ep", there=Parallelism(world_size=2, ep=2), expected="CLOSE"),
    case("shards", f"{LOOP}:ddp", f"{WRONG}:exchanged_shards"),
    case("reversed", f"{LOOP}:fsdp", f"{WRONG}:reversed_rows", ONE),
    case("replicas", f"{LOOP}:fsdp", f"{WRONG}:one_replica_exchanged", FOUR, FOUR),
    case("doubled", f"{LOOP}:ep", f"{WRONG}:doubled_under_ep", there=Parallelism(world_size=2, ep=2)),
    case("norm", f"{LOOP}:ep", f"{WRONG}:norm_left_alone", there=Parallelism(world_size=2, ep=2)),
    case("late", f"{LOOP}:ddp", f"{WRONG}:late_loader", ONE),
    case("uneven", f"{LOOP}:uneven", f"{LOOP}:uneven_halves", ONE, expected="CLOSE"),
    case("flat", f"{WRONG}:whole", f"{WRONG}:flattened"),
    case("flat_three", f"{WRONG}:flattened", f"{WRONG}:rows_sharded", THREE, THREE, expected="CLOSE"),
    case("element", f"{WRONG}:whole", f"{WRONG}:flattened_wrong"),
    replace(
        case("none_fsdp2", f"{WRONG}:rows_sharded", f"{WRONG}:rows_without_one_gradient"), reference_parallelism=None
    ),
    replace(
        case("none_fsdp1", f"{WRONG}:flattened", f"{WRONG}:flattened_without_one_gradient"), reference_parallelism=None
    ),
    case("tiny", f"{LOOP}:ddp", f"{WRONG}:loss_off_by_little", ONE),
    case("float32", f"{LOOP}:ddp", f"{WRONG}:float32_alone", ONE, expected="CLOSE"),
    case("numpy", f"{LOOP}:ddp", f"{WRONG}:scaled_by_numpy", ONE, expected="CLOSE"),
    case("means", f"{LOOP}:uneven", f"{WRONG}:mean_of_means", ONE),
]


class Runs:
    """What each case came to, and the runs that it took: of a case that no test asks for, none."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.results: dict[str, CaseResult] = {}
        self.arms: dict[str, list[str]] = {}

    def result(self, name: str) -> CaseResult:
        if name not in self.results:
            [asked] = [each for each in CASES if each.name == name]
            arms = self.arms.setdefault(name, [])

            def on_event(event: Event) -> None:
                arms.extend([event.arm] if event.event == "start" else [])

            with one_host():
                [self.results[name]] = run_cases([asked], RunOptions(device="cpu"), self.folder / name, on_event)
        return self.results[name]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    return Runs(tmp_path_factory.mktemp("run"))


@pytest.mark.parametrize("name", sweep(["equal", "unstated"], "unstated"))
def test_two_layouts_that_take_the_same_sums_are_equal_though_the_case_says_nothing(runs, name):
    result = runs.result(name)
    assert (result.verdict, result.error) == (Verdict.EQUAL, None)
    assert sum(result.compared.values()) == 252 and not any(result.mismatched.values())
    assert result.layouts.regrouped == 0 and result.layouts.across > 0
    assert runs.arms[name] == ["first", "first", "cells", "cells"], "as many runs as of one layout"


def test_stages_on_more_ranks_than_a_whole_model_must_agree_in_every_bit(runs):
    result = runs.result("staged")
    assert (result.verdict, result.error) == (Verdict.EQUAL, None)
    assert result.losses["reference"] == result.losses["candidate"] and len(result.losses["candidate"]) == 2
    assert result.layouts.regrouped == 0 and result.layouts.exact == sum(result.compared.values())


def test_what_fsdp1_flattens_is_compared_with_what_every_rank_has_whole(runs):
    result = runs.result("flat")
    assert (result.verdict, result.error) == (Verdict.EQUAL, None)
    parts, counts = 2 * 4 * 4, 2 * 3  # three of four parameters have elements on one rank alone, and a step count there
    assert (result.layouts.across, result.layouts.regrouped) == (parts + counts, 0)
    assert result.compared["param"] == 2 * 2 * 4
    first = runs.result("element").first_divergence
    assert (first.step, first.kind, first.name, first.rank) == (0, "param", "2.weight", 1)


@pytest.mark.parametrize("name", sweep(["fewer", "experts", "uneven", "flat_three"], "fewer"))
def test_fewer_ranks_and_other_experts_regroup_sums_and_are_close_within_derived_bounds(runs, name):
    result = runs.result(name)
    assert (result.verdict, result.error) == (Verdict.CLOSE, None)
    assert result.as_expected and contradiction(result) is None
    samples = result.layouts.samples
    assert samples == FEWEST_SAMPLES and max(row.used for row in result.layouts.rows) < 1
    orders = [f"regrouped{seed}" for seed in range(1, samples + 1)]
    assert runs.arms[name][4:] == [*orders, "float64", "float64", "float64regrouped1"]
    wide = result.layouts.in_float64
    assert (wide.beyond, wide.failed, wide.narrow) == (0, None, None) and result.remarks == ()


def test_a_defect_as_small_as_rounding_is_seen_in_float64(runs):
    result = runs.result("tiny")
    assert (result.verdict, result.layouts.beyond) == (Verdict.DIFFERENT, 0) and result.layouts.is_within
    assert contradiction(result) is None
    assert result.error.startswith("in float64 the relative error of step 0, loss loss is still 2e-07")
    assert (result.first_divergence.kind, result.first_divergence.name) == ("loss", "loss")


@pytest.mark.slow
def test_a_system_that_does_not_run_in_float64_is_close_with_a_remark_that_says_why(runs):
    result = runs.result("float32")
    assert result.verdict == Verdict.CLOSE and contradiction(result) is None
    assert "needs float32" in result.layouts.in_float64.failed
    assert any(remark.startswith("the second test, in float64, was not possible") for remark in result.remarks)
    assert result.layouts.samples in (FEWEST_SAMPLES, MOST_SAMPLES)


@pytest.mark.slow
def test_numbers_that_numpy_rounded_make_what_stays_a_remark(runs):
    result = runs.result("numpy")
    assert result.verdict == Verdict.CLOSE and contradiction(result) is None
    assert "laid_out.py:" in result.layouts.in_float64.narrow and result.layouts.in_float64.beyond
    (remark,) = result.remarks
    assert remark.startswith("a small defect is possible: in float64") and "laid_out.py:" in remark


@pytest.mark.slow
@pytest.mark.parametrize("name", ["none_fsdp2", "none_fsdp1"])
def test_a_gradient_of_none_on_one_side_is_no_other_layout_and_a_call_is_blamed_for_the_first_difference(runs, name):
    result = runs.result(name)
    assert (result.verdict, result.layouts) == (Verdict.DIFFERENT, None)
    assert "grad 2.bias: float32" in result.error and "none in the candidate" in result.error
    first = result.first_divergence
    assert (first.step, first.kind, first.call.operator) == (0, "param", "mul_.Tensor")
    assert not any("sharded otherwise" in text for text in (result.error, *result.remarks))


@pytest.mark.parametrize(
    ("name", "tensor"),
    sweep(
        [
            ("shards", ("loss", "loss")),
            ("reversed", ("grad", "blocks.0.up.weight")),
            ("replicas", ("grad", "blocks.0.up.weight")),
            ("doubled", ("grad", "blocks.1.weight")),
            ("norm", ("grad", "blocks.1.norm.weight")),
            ("late", ("loss", "loss")),
            ("means", ("loss", "loss")),
        ],
        ("reversed", ("grad", "blocks.0.up.weight")),
    ),
)
def test_a_defect_of_a_change_of_layout_is_different_and_named_by_its_tensor(runs, name, tensor):
    result = runs.result(name)
    assert result.verdict == Verdict.DIFFERENT and contradiction(result) is None
    first = result.first_divergence
    assert (first.step, first.kind, first.name) == (0, *tensor)
    up = "blocks.0.up (backward)"
    places = {"reversed": up, "replicas": up, "doubled": "blocks.1 (backward)", "norm": "blocks.1.norm (backward)"}
    if name == "replicas":
        assert "ranks that hold the same part of it do not agree" in result.error
        assert any(remark.startswith("replicas of one tensor differ within the candidate") for remark in result.remarks)
    lines = [remark for remark in result.remarks if remark.startswith("no call is blamed")]
    (remark,) = lines
    assert remark.endswith(f"{' '.join(tensor)} is of {places.get(name, 'the step itself (forward)')}")
