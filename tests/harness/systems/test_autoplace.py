"""The placements of a model: what is chosen under which bound, and what it says of every parameter."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from bitproof.builtin_cases.autoplace import autoplace_deepseek_fsdp2_tp2_ep2, autoplace_llama3_fsdp2_tp2
from bitproof.harness.case import Autoplace, Case, Model, Parallelism, Plan, with_plan
from bitproof.harness.errors import CaseError, PlacementError
from bitproof.harness.placement.build import SPLIT, STATE_BYTES, WHOLE
from bitproof.harness.placement.solve import MIB, least_bytes, solve
from bitproof.harness.powers.proofs.prover.answers import PROVED
from bitproof.harness.powers.proofs.prover.prove import prove_case
from bitproof.harness.records import Placed
from bitproof.harness.systems import autoplace
from bitproof.harness.systems.autoplace import Traced, by_hand, place, plan_hash, trace_placements
from bitproof.harness.systems.graph import prepare
from bitproof.harness.systems.graph_key import placed_case
from bitproof.reference.models import build_model
from bitproof.reference.parallel.mesh import Mesh
from bitproof.reference.step import build_sharded_model

LLAMA = autoplace_llama3_fsdp2_tp2


@pytest.fixture(autouse=True)
def _trace_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autoplace, "trace_placements", traced)


@functools.cache
def _traced(case: Case) -> Traced:
    return trace_placements(case)


def traced(case: Case) -> Traced:
    return _traced(replace(case, name="any", autoplace=Autoplace(memory_mib=1.0)))


@functools.cache
def bounded(case: Case, mib: float) -> tuple[Plan, Placed]:
    return place(replace(case, autoplace=Autoplace(memory_mib=mib)))


pytestmark = pytest.mark.traces


def test_a_layer_of_each_kind_is_traced_and_stands_for_all() -> None:
    assert traced(LLAMA).kinds == {"0": ["0", "1"]}
    assert traced(LLAMA).names("layers.0.attention") == ["layers.0.attention", "layers.1.attention"]
    assert traced(autoplace_deepseek_fsdp2_tp2_ep2).kinds == {"0": ["0"], "1": ["1", "2"]}


def test_with_room_enough_nothing_is_split_and_with_little_every_layer_is() -> None:
    roomy, reported = bounded(LLAMA, 64.0)
    assert roomy.split == () and reported.bytes <= reported.bound == 64 * MIB
    tight, _ = bounded(LLAMA, reported.least / MIB + 0.001)
    assert tight.split == tuple(f"layers.{n}.{name}" for n in range(2) for name in ("attention", "feed_forward"))
    assert len(tight.replicated) < len(roomy.replicated)


@pytest.mark.slow
def test_what_was_solved_for_costs_no_more_than_plans_by_hand_that_keep_the_bound() -> None:
    for mib in (4.2, 6.0, 64.0):
        _, reported = bounded(LLAMA, mib)
        keep = [cost for cost, held in reported.beside.values() if held <= reported.bound]
        assert keep and all(reported.cost <= cost + 1e-6 for cost in keep)
        assert reported.least <= reported.bytes <= reported.bound and reported.gap <= 1e-6


def test_a_bound_that_nothing_keeps_is_refused_with_the_least_that_would_do() -> None:
    least = least_bytes(traced(LLAMA).program) / MIB
    with pytest.raises(PlacementError, match=r"expected: a bound of at least 3\.491 MiB[^\n]*\n  found: 3\.48 MiB"):
        bounded(LLAMA, 3.48)
    assert 3.490 < least <= 3.491 and bounded(LLAMA, 3.491)[1].bytes <= 3.491 * MIB


def test_the_optimum_over_layers_and_parameters_is_that_of_trying_every_plan() -> None:
    """What is free once layers and parameters are chosen, operators, is left to the solver: all else is tried."""
    found = traced(LLAMA)
    layers = [layer.name for layer in found.scene.layers]
    bound = 4.2 * MIB
    costs = []
    for number in range(2 ** len(layers)):
        kinds = {name: (number >> place) & 1 for place, name in enumerate(layers)}
        try:
            costs.append(solve(found.program.fixed(kinds), bound).taken.cost)
        except PlacementError:
            continue
    assert solve(found.program, bound).taken.cost == pytest.approx(min(costs))
    assert len(costs) < 4, "some plans do not keep the bound"


def test_solving_twice_gives_the_same_plan() -> None:
    first, again = (bounded(LLAMA, 4.2)[0] for _ in range(2))
    assert first == again and plan_hash(first) == plan_hash(again)
    assert plan_hash(first) != plan_hash(replace(first, replicated=first.replicated[1:]))


def test_plans_by_hand_are_dearer_where_they_split_a_small_model_and_hold_less() -> None:
    found = by_hand(traced(LLAMA))
    assert list(found) == ["fsdp", "fsdp and tp"]
    assert found["fsdp"].cost < found["fsdp and tp"].cost and found["fsdp"].bytes > found["fsdp and tp"].bytes


def test_a_mixture_of_experts_is_split_whatever_the_bound() -> None:
    plan, reported = bounded(autoplace_deepseek_fsdp2_tp2_ep2, 64.0)
    assert plan.split == ("layers.1.moe", "layers.2.moe")
    assert {row.name.split(" ")[0] for row in reported.parameters if ".experts." in row.name} == {
        f"layers.1.moe.experts.{name}" for name in ("w1", "w2", "w3")
    }


def test_every_parameter_of_the_model_is_reported_once_with_its_copies() -> None:
    _, reported = bounded(autoplace_deepseek_fsdp2_tp2_ep2, 64.0)
    model = build_model(autoplace_deepseek_fsdp2_tp2_ep2.model)
    assert sum(row.copies for row in reported.parameters) == len(list(model.parameters()))


def test_without_tensor_ranks_only_the_axis_of_data_is_left() -> None:
    case = replace(LLAMA, model=Model(family="llama3", layers=1), parallelism=Parallelism(world_size=2, ep=1))
    plan, reported = bounded(case, 64.0)
    assert plan.split == () and {row.tensor for row in reported.parameters} == {"R"}


def test_heads_that_ranks_cannot_share_leave_a_layer_whole_and_experts_that_cannot_refuse() -> None:
    case = replace(LLAMA, model=Model(family="llama3", layers=1), parallelism=Parallelism(world_size=8, ep=1, tp=8))
    may_be = {layer.name: layer.may_be for layer in traced(case).scene.layers}
    assert may_be == {"layers.0.attention": (WHOLE,), "layers.0.feed_forward": (WHOLE, SPLIT)}
    experts = replace(autoplace_deepseek_fsdp2_tp2_ep2, batch=replace(LLAMA.batch, sequences=1, seq_len=33))
    with pytest.raises(CaseError, match="does not split evenly"):
        trace_placements(experts)


def test_a_case_keeps_the_plan_that_it_states() -> None:
    stated = replace(LLAMA, autoplace=Autoplace(memory_mib=0.001, plan=Plan()))
    assert placed_case(stated) is stated
    plan = placed_case(LLAMA).autoplace
    assert plan is not None and plan.plan == bounded(LLAMA, 4.2)[0]


@pytest.mark.slow
@pytest.mark.parametrize("mib", [3.6, 4.2, 64.0])
def test_what_the_finished_graph_holds_beside_the_state_is_within_what_was_counted(mib: float) -> None:
    """The bytes that a pass measures of the graph that ranks run, and those of every parameter's state, float32."""
    plan, reported = bounded(LLAMA, mib)
    case = with_plan(LLAMA, plan)
    program = prepare(case, torch.device("cpu"), system="autoplace")
    measured = next(entry.facts["peak_mib"] for entry in program.passes if entry.name == "measure_memory")
    parameters = build_sharded_model(case, Mesh(0, case.parallelism), torch.device("meta")).parameters()
    state = sum(STATE_BYTES * parameter.numel() for parameter in parameters)
    assert measured > 0 and measured * MIB + state <= reported.bytes <= mib * MIB


@pytest.mark.slow
def test_every_output_of_a_placed_step_is_proved_equal_to_eager_under_the_same_placements() -> None:
    found = prove_case(LLAMA, evaluate=False)
    assert (found.verdict, found.reason) == (PROVED, None)
