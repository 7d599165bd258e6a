"""What follows a step, proved: one-layer models on two ranks, and what it must not prove."""

import functools
from dataclasses import replace

import pytest
import torch

from bitproof.builtin_cases import CASES
from bitproof.harness import certificate_checker as checker
from bitproof.harness.case import Parallelism
from bitproof.harness.certificate_checker import RejectedError
from bitproof.harness.powers.proofs.command import _lines, _update_data
from bitproof.harness.powers.proofs.prover import proof_data as data
from bitproof.harness.powers.proofs.prover import whole_step
from bitproof.harness.powers.proofs.prover.answers import prove_graphs
from bitproof.harness.powers.proofs.prover.certify import certificate_of, contents_of, subject_of
from bitproof.harness.powers.proofs.prover.graphs.export import RefusedError
from bitproof.harness.powers.proofs.prover.prove import prove_case
from bitproof.reference.step import Trainer
from tests.harness.certificate.samples import check, parsed
from tests.sweeps import sweep

pytestmark = pytest.mark.traces


@functools.cache
def followed():
    case = CASES["moe_seq"]
    model = replace(case.model, layers=1, dense_layers=0)
    case = replace(case, model=model, parallelism=Parallelism(world_size=2, ep=2))
    return prove_case(case, evaluate=False, follow=True)


def groups():
    """The table of groups of a case's own."""
    from bitproof.harness.systems.graph_program import group_table
    from bitproof.reference.parallel.mesh import Mesh

    return group_table(Mesh(0, followed().case.parallelism))


def joined(case, step):
    return whole_step.join(step, whole_step._Updates(case, torch.device("cpu")).of(step, groups()))


def test_any_number_of_steps_is_proved_with_balanced_experts_and_optimizer_state():
    found = followed()
    proved = found.update
    assert (proved.verdict, proved.induction.holds, proved.induction.reason) == ("PROVED", True, None)
    outputs = {answer.output for answer in proved.answers}
    names = [x.removeprefix("gradient of ") for x, _ in found.graphs[0].outputs if x != "loss"]
    kept = [f"optimizer {name}.{key}" for name in names for key in ("step", "exp_avg", "exp_avg_sq")]
    buffers = [f"buffer layers.0.moe.{name}" for name in ("expert_bias", "tokens_per_expert")]
    assert outputs == {f"written {x}" for x in [*(f"parameter {name}" for name in names), *kept, *buffers]}
    assert _lines(found)[-2:] == [
        f"  what follows the step: PROVED: {len(outputs)} of {len(outputs)} outputs",
        "  any number of steps: PROVED, from equal parameters, buffers and optimizer state, where both read the same "
        "inputs",
    ]
    reported = _update_data(proved)
    assert (reported["any_number_of_steps"], len(reported["state"])) == (True, len(outputs))


def certified(proof):
    case = followed().case
    return certificate_of(case.name, proof, subject_of(case, proof))


def said_of(certificate):
    """What the checker says, the certificate's subject among it; None if it rejects it."""
    head, *graphs, steps = parsed(contents_of(certificate))
    try:
        return checker.check(head, graphs, steps), checker.covers_any_number(head, graphs)
    except RejectedError:
        return None


def test_a_certificate_covers_any_number_of_steps_where_the_whole_step_is_in_it():
    found = followed()
    counts, covers = said_of(certified(found.update.proof))
    assert (counts, covers) == ({"PROVED": len(found.update.proof.answers)}, True)
    assert said_of(certified(found.proof)) == ({"PROVED": len(found.proof.answers)}, False)


@pytest.mark.slow
def test_a_forged_whole_step_is_rejected():
    """The one answers for another update; in the other neither side updates one parameter; in the third one side's
    state comes in another order."""
    found = followed()
    other = replace(found.case, optimizer=replace(found.case.optimizer, lr=0.5))
    sides = [joined(case, step) for case, step in zip((found.case, other), found.graphs, strict=True)]
    certificate = certified(prove_graphs(*sides, must_read=()))
    counts, covers = said_of(certificate)
    assert counts["NOT PROVED"] and not covers
    assert said_of(replace(certificate, answers=tuple((name, "PROVED") for name, _ in certificate.answers))) is None

    name = "parameter layers.0.attention.wq.weight"
    graphs = [without_writes(joined(found.case, step), name) for step in found.graphs]
    forged = certified(prove_graphs(*graphs, must_read=()))
    assert check(forged) == {"PROVED": len(found.update.proof.answers) - 1}
    assert said_of(forged) is None

    whole = certified(found.update.proof)
    first, second = [i for i, x in enumerate(whole.candidate.calls) if x.name.startswith("optimizer ")][:2]
    calls = [*whole.candidate.calls]
    calls[first], calls[second] = calls[second], calls[first]
    assert said_of(replace(whole, candidate=data.Graph(tuple(calls), whole.candidate.outputs))) is None


def without_writes(graph, name):
    """A graph in which what is written to an input is computed and left beside it."""
    place = next(i for i, x in enumerate(graph.calls) if x.name == name)

    def left(index, call):
        if not call.writes or dict(call.args)["self"] != ("node", place):
            return call
        aside = replace(call.value, storage=10**6 + index)
        args = (("self", dict(call.args)["src"]),)
        return replace(call, op="aten.clone.default", args=args, writes=(), value=aside)

    return data.Graph(tuple(left(i, call) for i, call in enumerate(graph.calls)), graph.outputs)


@pytest.mark.parametrize(
    "changed",
    sweep(
        [{"lr": 0.5}, {"betas": (0.8, 0.9)}, {"eps": 1e-3}, {"expert_bias_lr": 0.1}],
        {"lr": 0.5},
        {"expert_bias_lr": 0.1},
    ),
)
def test_another_update_is_not_proved(changed):
    found = followed()
    other = replace(found.case, optimizer=replace(found.case.optimizer, **changed))
    sides = [joined(case, step) for case, step in zip((found.case, other), found.graphs, strict=True)]
    proof = prove_graphs(*sides, must_read=())
    unproved = {x.output for x in proof.answers if x.verdict == "NOT PROVED"}
    only_biases = {"written buffer layers.0.moe.expert_bias"}
    assert unproved and (unproved == only_biases) == ("expert_bias_lr" in changed)


def relaid(graph, name, **changed):
    """A graph that copies an output of a name, in the end, into memory where it lies otherwise."""
    index = dict(graph.outputs)[name]
    lies = replace(graph.calls[index].value, storage=10**6, **changed)
    copied = data.Call("copied", "aten.clone.default", (("self", ("node", index)),), lies)
    outputs = tuple((x, len(graph.calls) if x == name else i) for x, i in graph.outputs)
    return data.Graph((*graph.calls, copied), outputs)


def test_a_gradient_counts_by_its_elements_in_rows_and_no_other_layout_is_taken():
    found = followed()
    name = "gradient of layers.0.attention.wq.weight"
    step = found.graphs[1]
    moved = relaid(step, name, offset=3)
    proof = prove_graphs(joined(found.case, step), joined(found.case, moved), must_read=())
    assert {x.verdict for x in proof.answers if x.output.startswith("written optimizer")} == {"PROVED"}
    rows, _ = step.calls[dict(step.outputs)[name]].value.shape
    with pytest.raises(RefusedError, match=r"aten\._fused_adamw_\.default"):
        joined(found.case, relaid(step, name, strides=(1, rows)))


def test_a_gradient_in_memory_that_the_update_writes_is_refused():
    found = followed()
    step = found.graphs[0]
    place = next(i for i, x in enumerate(step.calls) if x.name == "parameter layers.0.attention.wq.weight")
    name = "gradient of layers.0.attention.wq.weight"
    outputs = tuple((x, place if x == name else i) for x, i in step.outputs)
    with pytest.raises(RefusedError, match="lies in memory of an input, which the update writes"):
        joined(found.case, data.Graph(step.calls, outputs))


def test_a_buffer_that_lies_otherwise_after_the_step_is_refused():
    found = followed()
    step = found.graphs[0]
    own = whole_step._Updates(found.case, torch.device("cpu")).of(step, groups())
    index = next(i for i, x in enumerate(own.calls) if x.name == "buffer layers.0.moe.expert_bias")
    call = own.calls[index]
    calls = [*own.calls[:index], replace(call, value=replace(call.value, dtype="float64")), *own.calls[index + 1 :]]
    with pytest.raises(RefusedError, match="has another layout after the step than before"):
        whole_step.join(step, data.Graph(tuple(calls), own.outputs))


def test_an_update_that_cannot_be_traced_is_refused_with_the_reason(monkeypatch):
    found = followed()

    def fails(*_):
        raise ValueError("no such rate")

    monkeypatch.setattr(Trainer, "update", fails)
    refused = whole_step.prove_update(found.case, found, (groups(), groups()), torch.device("cpu"))
    assert refused.verdict == "REFUSED" and "ValueError: no such rate" in refused.reason
    assert not refused.induction.holds
