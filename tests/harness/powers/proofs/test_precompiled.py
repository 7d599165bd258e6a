"""What a precompiled step's file says, proved."""

from dataclasses import replace

import pytest
import torch

from bitproof.builtin_cases import CASES
from bitproof.harness.case import GRAPH, Parallelism
from bitproof.harness.errors import ArtifactError
from bitproof.harness.machine.determinism import set_determinism
from bitproof.harness.powers.proofs.prover.precompiled import precompiled_step
from bitproof.harness.powers.proofs.prover.prove import prove_case
from bitproof.harness.precompile.artifact import precompile, read_program, write_program
from bitproof.harness.precompile.fingerprint import fingerprint_of
from bitproof.harness.systems.graph_program import code_hash

CPU = torch.device("cpu")


def small(reference):
    """A case with one MoE layer on two ranks, whose candidate is a precompiled step."""
    case = CASES["precompiled_experts_seq"]
    model = replace(case.model, layers=1, dense_layers=0)
    return replace(case, model=model, parallelism=Parallelism(world_size=2, ep=2), reference=reference)


def test_a_folder_without_a_step_is_refused(tmp_path):
    with pytest.raises(ArtifactError, match="there is no precompiled step"):
        precompiled_step(small("eager_chunked"), GRAPH, CPU, tmp_path)


@pytest.mark.slow
@pytest.mark.traces
@pytest.mark.parametrize("reference", [GRAPH, "eager_chunked"])
def test_a_step_that_is_made_now_is_proved(reference):
    found = prove_case(small(reference))
    assert (found.verdict, found.proof.count("PROVED"), found.evaluated) == ("PROVED", 19, 19)


@pytest.mark.slow
@pytest.mark.traces
def test_a_file_is_proved_and_one_whose_graph_was_changed_is_not(tmp_path):
    case = replace(small("eager_chunked"), candidate=GRAPH)
    set_determinism(case.seed)
    precompile(case, GRAPH, CPU, tmp_path)
    assert prove_case(case, precompiled=tmp_path, evaluate=False).verdict == "PROVED"

    program = read_program(tmp_path, case, GRAPH, CPU)
    sigmoid = next(node for node in program.module.graph.nodes if node.target is torch.ops.aten.sigmoid.default)
    sigmoid.target = torch.ops.aten.tanh.default
    program.module.recompile()
    program = replace(program, code_hash=code_hash(program.module))
    write_program(program, case, GRAPH, fingerprint_of(case, GRAPH, CPU), tmp_path)
    found = prove_case(case, precompiled=tmp_path, evaluate=False)
    assert found.verdict == "NOT PROVED"
    [answer] = [answer for answer in found.proof.answers if answer.output == "loss"]
    assert any("aten.tanh" in line for line in answer.finding.lines())

    with pytest.raises(ArtifactError, match="seed"):
        prove_case(replace(case, seed=case.seed + 1), precompiled=tmp_path, evaluate=False)
