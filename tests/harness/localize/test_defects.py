"""Each of twelve defects is blamed on the right call, from one log of each system."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from bitproof.builtin_cases.chunking import transformer_batch
from bitproof.harness.capture.digest import digest
from bitproof.harness.case import Case, Parallelism
from bitproof.harness.localize.blame import find_culprit
from bitproof.harness.localize.culprit import Culprit
from bitproof.harness.localize.logs.call_log import logged
from bitproof.harness.localize.logs.calls import Call, calls_from_text, calls_to_text
from bitproof.harness.systems.graph import prepare
from bitproof.harness.systems.graph_program import GraphProgram, make_graph_system
from bitproof.reference.parallel.mesh import Mesh
from bitproof.reference.step import Trainer, make_eager
from tests.harness.localize.defects import BAD_RANK, DEFECTS, EXPERTS, Defect
from tests.harness.localize.noisy import NOISY_RANK, add_noise
from tests.ranks import on_ranks
from tests.small import small

pytestmark = pytest.mark.ranks

CPU = torch.device("cpu")
CASE = replace(small(transformer_batch, layers=2), parallelism=Parallelism(world_size=2))

NOISE = Defect("noise", add_noise, EXPERTS, "forward", ("sum_in_any_order",))
NOISY_RUNS = ("noisy", "noisy again")

Answer = tuple[str, dict[str, str]]
"""One rank's log as text, and the digests of what it observed."""


def program_of(program: GraphProgram, defect: Defect) -> GraphProgram:
    """The program with a defect in it."""
    if defect.edit is None:
        return program
    module = copy.deepcopy(program.module)
    defect.edit(module)
    module.recompile()
    return replace(program, module=module, run=module)


def case_of(defect: Defect) -> Case:
    """The case, with a defect of the trainer in it."""
    return CASE if defect.edit else replace(CASE, optimizer=replace(CASE.optimizer, weight_decay=0.2))


def step(trainer: Trainer) -> Answer:
    from torch.utils._python_dispatch import _disable_current_modes

    seen: dict[str, str] = {}

    def observe(kind: str, name: str, x: Tensor) -> None:
        with _disable_current_modes():
            seen[f"{kind} {name}"] = digest(x)

    with logged(trainer) as log:
        trainer.step(0, observe)
    return calls_to_text(log.calls), seen


@pytest.fixture(scope="module")
def answers() -> list[dict[str, Answer]]:
    """By rank: the answer of eager, of the right graph, of each defect, and of two runs of a noisy graph."""
    program = prepare(CASE, CPU)

    def body(mesh: Mesh) -> dict[str, Any]:
        found = {"eager": step(make_eager(CASE, mesh, CPU, True, lambda f: f))}
        found["graph"] = step(make_graph_system(CASE, mesh, CPU, program, lambda f: f))
        for defect in DEFECTS:
            bad = make_graph_system(case_of(defect), mesh, CPU, program_of(program, defect), lambda f: f)
            found[defect.name] = step(bad)
        for turn in NOISY_RUNS:
            noisy = make_graph_system(CASE, mesh, CPU, program_of(program, NOISE), lambda f: f)
            found[turn] = step(noisy)
        return found

    return on_ranks(CASE.parallelism, body)


def blamed(answers: list[dict[str, Answer]], name: str, right: str = "eager") -> Culprit | None:
    logs: dict[str, list[list[Call]]] = {
        system: [calls_from_text(answer[system][0], system) for answer in answers] for system in (right, name)
    }
    differing = {
        rank: [(answer[right][1][key], seen) for key, seen in answer[name][1].items() if answer[right][1][key] != seen]
        for rank, answer in enumerate(answers)
    }
    assert name == "graph" or any(differing.values()), "the defect changes nothing"
    return find_culprit(logs[right], logs[name], differing)


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_the_right_module_direction_and_operator_are_named(answers: list[dict[str, Answer]], defect: Defect) -> None:
    culprit = blamed(answers, defect.name)
    assert culprit is not None
    place = culprit.call.place
    found = place.direction, culprit.call.operator.partition(".")[0] in defect.operators
    assert found == (defect.direction, True), culprit
    assert defect.module is None or place.module == defect.module, culprit


def test_a_right_step_has_no_culprit(answers: list[dict[str, Answer]]) -> None:
    assert blamed(answers, "graph") is None


def test_the_bad_rank_is_blamed_alone(answers: list[dict[str, Answer]]) -> None:
    culprit = blamed(answers, "rows_arrive_in_reverse_on_one_rank")
    assert culprit is not None and culprit.ranks == (BAD_RANK,)


def test_between_two_runs_of_a_noisy_graph_the_noisy_call_is_blamed_on_its_rank_alone(
    answers: list[dict[str, Answer]],
) -> None:
    culprit = blamed(answers, "noisy again", right="noisy")
    assert culprit is not None
    assert (culprit.how, culprit.call.operator, culprit.ranks) == ("computes", "sum_in_any_order", (NOISY_RANK,))
    assert (culprit.call.place.module, culprit.call.place.direction) == (EXPERTS, "forward")
