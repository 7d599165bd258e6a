"""The search on cases that nobody runs: a function tells what each would come to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from bitproof.builtin_cases.chunking import transformer_batch
from bitproof.harness.case import Case, Memory, Model, Parallelism, Pipeline
from bitproof.harness.powers.shrink.shrink_case import Budget, Symptom, Trial, change, differences, shrink, symptom_of
from bitproof.harness.records import BlamedCall, CaseResult, Divergence, Verdict

SIZES: dict[str, Any] = {"layers": 3, "dense_layers": 1, "experts": 8, "top_k": 3, "dim": 64, "heads": 4}
CASE = replace(transformer_batch, model=Model(**SIZES))
PASSES = ("cases/examples/extra_passes.py:wait_late", "cases/examples/extra_passes.py:add_gradients_in_bfloat16")


def result(case: Case, verdict: Verdict = Verdict.DIFFERENT, error: str | None = None, **blame: Any) -> CaseResult:
    place = {name: blame.pop(name) for name in ("step", "rank", "kind") if name in blame}
    call = BlamedCall(**blame) if blame.get("operator") else None
    first = Divergence(**{"step": 0, "rank": 0, "kind": "grad", "name": "w"} | place, call=call)
    return CaseResult(
        case=case,
        verdict=verdict,
        steps=case.steps,
        world_size=case.parallelism.world_size,
        device="cpu",
        backend="gloo",
        first_divergence=first if verdict == Verdict.DIFFERENT else None,
        error=error,
    )


class Runs:
    """Runs a trial by asking `fails`; keeps what was asked, and the lines that were shown."""

    def __init__(
        self,
        fails: Callable[[Trial], bool | CaseResult],
        start: Trial | None = None,
        tries: int = 1000,
    ):
        self.fails = fails
        self.asked: list[Trial] = []
        self.lines: list[str] = []
        self.time = 0.0
        self.start = start or Trial(CASE)
        self.budget = Budget(tries, 3600.0, clock=lambda: self.time)
        self.smallest = shrink(self.start, self(self.start), self.ask, self.budget, self.lines.append)

    def ask(self, trial: Trial) -> CaseResult:
        self.asked.append(trial)
        self.time += 2.0
        return self(trial)

    def __call__(self, trial: Trial) -> CaseResult:
        found = self.fails(trial)
        if isinstance(found, CaseResult):
            return found
        return result(trial.case, Verdict.DIFFERENT if found else Verdict.EQUAL)

    @property
    def changed(self) -> dict[str, Any]:
        return {name: now for name, _, now in differences(self.start, self.smallest)}


def test_what_fails_always_shrinks_to_the_least_of_everything_with_two_ranks_left() -> None:
    start = Trial(
        replace(
            CASE,
            memory=Memory(policy="offload"),
            pipeline=Pipeline(bucket=True, overlap=True, isolate_groups=True),
            parallelism=Parallelism(shared_groups=True),
        )
    )
    runs = Runs(lambda trial: True, start)
    assert runs.changed == {
        "steps": 1,
        "world_size": 2,
        "ep": 1,
        "shared_groups": False,
        "layers": 1,
        "sequences": 2,
        "seq_len": 1,
        "dim": 8,
        "heads": 1,
        "policy": "none",
        "isolate_groups": False,
        "bucket": False,
        "overlap": False,
    }
    assert len(runs.asked) == 13, "one run for each, none for what cannot be"
    assert len(set(runs.asked)) == len(runs.asked)
    assert runs.lines[0] == "[   2.0 s] try 1: steps 20 -> 1: fails the same way (2.0 s)"


def test_what_cannot_be_smaller_stays_after_a_few_tries() -> None:
    runs = Runs(lambda trial: trial == Trial(CASE))
    assert runs.smallest == Trial(CASE)
    assert all(line.endswith(": EQUAL (2.0 s)") for line in runs.lines)
    assert len(set(runs.asked)) == len(runs.asked)


@pytest.mark.parametrize(
    ("needs", "found"),
    [
        (lambda case: case.batch.seq_len >= 7, {"seq_len": 7}),
        (lambda case: case.parallelism.world_size >= 4, {"world_size": 4}),
        (lambda case: case.model.layers - case.model.dense_layers >= 1, {"layers": 1, "dense_layers": 0}),
        (lambda case: case.model.layers >= 2 and case.model.dense_layers <= 1, {"layers": 2, "dense_layers": 1}),
        (lambda case: case.model.experts >= 6 and case.model.top_k >= 2, {"experts": 8, "top_k": 3}),
        (lambda case: case.model.dim >= 40, {"dim": 40}),
        (lambda case: case.steps >= 6, {"steps": 6}),
        (lambda case: case.batch.sequences >= 4, {"sequences": 4}),
    ],
)
def test_what_the_failure_needs_stays(needs: Callable[[Case], bool], found: dict[str, int]) -> None:
    smallest = Runs(lambda trial: needs(trial.case)).smallest.case
    settings = {**vars(smallest), **vars(smallest.batch), **vars(smallest.model), **vars(smallest.parallelism)}
    assert {name: settings[name] for name in found} == found


@pytest.mark.parametrize(
    ("start", "needs", "found"),
    [
        ((8, 4, 2), lambda p: True, (2, 1, 1)),
        ((8, 4, 2), lambda p: p.tp > 1, (2, 1, 2)),
        ((8, 4, 2), lambda p: p.tp > 1 and p.ep > 1, (2, 2, 2)),
        ((8, 4, 2), lambda p: p.tp > 1 and p.ep > p.tp, (4, 4, 2)),
        ((8, 8, 8), lambda p: p.tp == p.ep > 1, (2, 2, 2)),
        ((4, 4, 4), lambda p: p.tp == p.ep and p.world_size > 2, (3, 1, 1)),
    ],
)
def test_tensor_and_expert_groups_shrink_with_the_ranks_and_with_each_other(
    start: tuple[int, int, int], needs: Callable[[Parallelism], bool], found: tuple[int, int, int]
) -> None:
    names = ("world_size", "ep", "tp")
    parallelism = Parallelism(**dict(zip(names, start, strict=True)))
    case = replace(CASE, chunking=None, reference="eager", parallelism=parallelism)
    runs = Runs(lambda trial: needs(trial.case.parallelism), start=Trial(case))
    assert tuple(getattr(runs.smallest.case.parallelism, name) for name in names) == found


def test_what_a_backend_compiles_goes_with_the_backend() -> None:
    pipeline = Pipeline(backend="regional_inductor", regions=("layers.*",))
    runs = Runs(lambda trial: True, start=Trial(replace(CASE, pipeline=pipeline)))
    assert runs.smallest.case.pipeline == Pipeline()


def test_a_list_of_operators_goes_with_the_policy_that_reads_it() -> None:
    memory = Memory(policy="selective", save=("mm/2",))
    runs = Runs(lambda trial: True, start=Trial(replace(CASE, memory=memory)))
    assert runs.smallest.case.memory == Memory()


def test_a_mixture_keeps_as_few_experts_and_slots_as_fail() -> None:
    def fails(trial: Trial) -> bool:
        model = trial.case.model
        return model.dense_layers < model.layers and model.experts >= 3 and model.top_k >= 2

    model = Runs(fails).smallest.case.model
    assert (model.experts, model.top_k) == (3, 2)


def test_what_a_later_reduction_allows_is_tried_again() -> None:
    runs = Runs(lambda trial: trial.case.batch.seq_len >= 8 or trial.case.model.heads == 1)
    assert (runs.smallest.case.batch.seq_len, runs.smallest.case.model.heads) == (1, 1)


def test_the_first_differing_step_is_the_last_that_is_run() -> None:
    runs = Runs(lambda trial: result(trial.case, step=4) if trial.case.steps > 4 else False)
    assert runs.asked[0].case.steps == 5
    assert runs.smallest.case.steps == 5


def test_extra_passes_are_left_out_one_by_one() -> None:
    runs = Runs(lambda trial: PASSES[1] in trial.extra_passes, Trial(CASE, PASSES))
    assert runs.smallest.extra_passes == PASSES[1:]
    assert any(": extra passes 2 -> 1: fails the same way" in line for line in runs.lines)


def test_a_budget_of_tries_ends_the_search_with_what_it_has() -> None:
    runs = Runs(lambda trial: True, tries=2)
    assert runs.changed == {"steps": 1, "world_size": 2}
    assert runs.budget.is_spent


def test_a_budget_of_time_ends_the_search_too() -> None:
    time = iter(range(100))
    budget = Budget(1000, 10.0, clock=lambda: float(next(time)))
    shrink(Trial(CASE), result(CASE), lambda trial: result(trial.case), budget, lambda line: None)
    assert 1 <= budget.spent < 5


def test_a_fault_keeps_the_rank_and_the_step_that_it_needs() -> None:
    start = Trial(CASE, inject="flip-bit:grad=w,rank=3,step=2")
    runs = Runs(lambda trial: True, start)
    assert (runs.smallest.case.parallelism.world_size, runs.smallest.case.steps) == (4, 3)


BLAME = {
    "operator": "mul.Tensor",
    "direction": "forward",
    "module": "layers.2.moe",
    "node": "mul_7",
    "ranks": "3",
}


def test_numbers_of_layers_nodes_and_ranks_do_not_make_another_symptom() -> None:
    first = symptom_of(result(CASE, **BLAME))
    second = symptom_of(result(CASE, **BLAME | {"module": "layers.0.moe", "node": "mul", "rank": 1, "ranks": "1"}))
    assert first == second
    assert str(first) == "DIFFERENT, first in a grad, by mul.Tensor of layers.*.moe (forward)"


@pytest.mark.parametrize(
    "other",
    [
        {"kind": "loss"},
        {"operator": "add.Tensor"},
        {"direction": "backward"},
        {"module": "layers.2.attention"},
        {"operator": None, "direction": None, "module": None},
    ],
)
def test_another_kind_operator_direction_or_module_is_another_symptom(other: dict[str, Any]) -> None:
    assert symptom_of(result(CASE, **BLAME)) != symptom_of(result(CASE, **BLAME | other))


def test_the_module_of_a_call_that_the_candidate_alone_makes_does_not_count() -> None:
    added = BLAME | {"how": "is an extra call that the reference does not have"}
    first = symptom_of(result(CASE, **added))
    assert first == symptom_of(result(CASE, **added | {"module": "layers.2.attention"}))
    assert str(first) == "DIFFERENT, first in a grad, by mul.Tensor (forward)"


def test_what_fails_in_another_way_is_not_taken() -> None:
    def fails(trial: Trial) -> CaseResult:
        return result(trial.case, **BLAME | ({} if trial.case.model.dim == 64 else {"operator": "mm"}))

    runs = Runs(fails)
    assert runs.smallest.case.model.dim == 64
    assert any(
        line.endswith("dim 64 -> 8: DIFFERENT, first in a grad, by mm of layers.*.moe (forward) (2.0 s)")
        for line in runs.lines
    )


@pytest.mark.parametrize("verdict", [Verdict.EQUAL, Verdict.CLOSE, Verdict.NONDETERMINISTIC, Verdict.UNVERIFIED])
def test_what_is_not_a_failure_has_no_symptom(verdict: Verdict) -> None:
    assert symptom_of(result(CASE, verdict, error="RecordingError: something is missing")) is None


def test_an_error_is_known_by_its_class_and_words_not_by_names_and_numbers() -> None:
    def symptom(error: str) -> Symptom | None:
        return symptom_of(result(CASE, Verdict.ERROR, error))

    first = symptom(
        "ChunkError: cannot split `x_12` of layers.3\n  expected: T even\n  found: T=7\n\nTraceback\n  line 3"
    )
    assert first == symptom("ChunkError: cannot split `y` of layers.1.moe2\n  found: T=3\n\nTraceback\n  line 4")
    assert first != symptom("ChunkError: cannot join `x_12` of layers.3\n  found: T=7")
    assert first != symptom("PassError: cannot split `x_12` of layers.3\n  found: T=7")
    assert first != symptom("ChunkError: cannot split `x_12` of layers.3\n  found: a mask")


def test_a_change_that_contradicts_the_case_is_refused() -> None:
    with pytest.raises(Exception, match="cannot be split in two along batch"):
        change(Trial(CASE), {"batch.sequences": 3})


def ignorant(*, follows: tuple[str, ...] = ()) -> Callable[[Trial], CaseResult]:
    """Runs that differ always, of systems whose losses change with the sizes that they follow alone."""

    def run(trial: Trial) -> CaseResult:
        sizes = [str(getattr(trial.case.model, name)) for name in follows]
        found = result(trial.case, operator="mm", direction="forward", module="")
        return replace(found, losses={"reference": ["-".join(["0x1p+0", *sizes])], "candidate": ["0x1p+1"]})

    return run


FOREIGN = Trial(replace(CASE, reference="mine.py:eager", candidate="mine.py:graph", chunking=None))


def test_sizes_that_leave_every_bit_as_it_was_are_not_claimed_to_be_smaller() -> None:
    runs = Runs(ignorant(), FOREIGN)
    assert runs.changed.keys() == {"steps", "world_size", "ep"}
    assert runs.lines[-1] == (
        "left as they were, since mine.py:eager and mine.py:graph ignore them: "
        "dense_layers, dim, experts, heads, layers, seq_len, sequences, top_k"
    )
    assert sum("every size at its least: no bit changes" in line for line in runs.lines) == 1, "one run shows it"
    assert not any("dim 64" in line for line in runs.lines)


def test_a_size_that_a_foreign_system_follows_is_shrunk() -> None:
    runs = Runs(ignorant(follows=("dim",)), FOREIGN)
    assert runs.changed["dim"] == 8
    assert "layers" not in runs.changed
    assert sum("every size at its least: some are followed" in line for line in runs.lines) == 1


def test_built_in_systems_follow_every_size() -> None:
    runs = Runs(ignorant(), Trial(replace(FOREIGN.case, candidate="graph")))
    assert runs.changed["layers"] == 1
    assert not any("ignore" in line or "every size" in line for line in runs.lines)


def test_a_run_without_losses_does_not_show_what_is_ignored() -> None:
    assert Runs(lambda _: True, FOREIGN).changed["layers"] == 1
