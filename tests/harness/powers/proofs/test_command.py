"""`bitproof prove` as it is called, on one-layer models; what it concludes is tested in tests/harness/powers/proofs."""

import json
from dataclasses import replace

import pytest

from bitproof.builtin_cases import CASES
from bitproof.harness.case import Memory, Parallelism
from bitproof.harness.cli import main
from bitproof.harness.errors import TraceError
from bitproof.harness.powers.proofs import command
from bitproof.harness.powers.proofs.prover.prove import CaseProof
from tests.harness.powers.proofs.toy_graphs import compare, randn

pytestmark = pytest.mark.traces


@pytest.fixture
def case_file(tmp_path):
    def write(name):
        path = tmp_path / f"{name}.json"
        case = CASES[name]
        model = replace(case.model, layers=1, dense_layers=0)
        case = replace(case, model=model, parallelism=Parallelism(world_size=2, ep=2))
        path.write_text(json.dumps(case.to_dict()))
        return str(path)

    return write


def test_a_proved_case_is_reported_in_a_line_with_what_it_assumes(case_file, capsys):
    assert main(["prove", "--case", case_file("moe_seq")]) == 0
    first, update, steps, *others = capsys.readouterr().out.splitlines()
    assert first.startswith("moe_seq: PROVED: 19 PROVED of 19 outputs; 19 of 19 computed and found so; ")
    assert update.startswith("  what follows the step: PROVED: ")
    assert steps.startswith("  any number of steps: PROVED, ")
    assert others[1] == "Assumptions, besides those on tracing in docs/explanation/proving.md:"


@pytest.mark.slow
def test_what_is_not_proved_shows_the_moved_additions(case_file, capsys):
    assert main(["prove", "--case", case_file("moe_seq"), "--early-grad-accumulation"]) == 1
    reported = capsys.readouterr().out
    assert "moe_seq: NOT PROVED, although EQUAL is expected: " in reported
    assert "the reference adds here: aten.add.Tensor" in reported
    assert "the candidate adds here: aten.add.Tensor" in reported


DROPS_WAITS = """
import torch

def drop(module):
    for name in ("wait_reload", "wait_offload"):
        for wait in module.graph.find_nodes(op="call_function", target=getattr(torch.ops.bitproof, name).default):
            wait.replace_all_uses_with(wait.args[0])
            module.graph.erase_node(wait)
    module.recompile()
"""


@pytest.mark.slow
def test_a_pass_that_drops_the_waits_for_copies_is_refused_naming_what_is_read_too_early(tmp_path, capsys):
    (tmp_path / "drops.py").write_text(DROPS_WAITS)
    memory, model = Memory(policy="offload"), replace(CASES["moe_seq"].model, layers=2)
    case = replace(CASES["moe_seq"], model=model, memory=memory, parallelism=Parallelism(world_size=2, ep=2))
    (tmp_path / "case.json").write_text(json.dumps(case.to_dict()))
    given = ["prove", "--case", str(tmp_path / "case.json")]
    assert main([*given, "--extra-pass", f"{tmp_path}/drops.py:drop"]) == 3
    reported = capsys.readouterr().out
    assert reported.startswith("moe_seq: REFUSED") and "load` brings, before anything waits for it" in reported


def test_json_has_every_output(case_file, capsys, monkeypatch):
    w, x = randn(4, 6), randn(4, 6)
    proof = compare(lambda w, x: (w + x, w - x), lambda w, x: (x + w, x - w), w, x)
    monkeypatch.setattr(command, "prove_case", lambda case, *_, **__: CaseProof(proof.verdict, proof, case=case))
    monkeypatch.setattr(command, "assumptions_of", lambda result: ["an assumption"])
    assert main(["prove", "--case", case_file("moe_seq"), "--json"]) == 1
    [case] = json.loads(capsys.readouterr().out)["cases"]
    assert (case["verdict"], case["outputs"]) == ("NOT PROVED", {"PROVED": 1, "NOT PROVED": 1, "REFUSED": 0})
    assert [answer["verdict"] for answer in case["answers"]] == ["PROVED", "NOT PROVED"]
    assert case["assumptions"] == ["an assumption"]


def test_a_table_has_a_row_a_case_with_its_outputs_counted(capsys):
    assert main(["prove", "-k", "inductor_dense", "--table"]) == 3
    machine, empty, head, ruler, row, _, reason = capsys.readouterr().out.splitlines()
    assert machine.startswith("torch ")
    assert (empty, ruler.count("|"), head.count("|")) == ("", 10, 10)
    assert row == "| inductor_dense | deepseek_v3 dense | 8 |  |  |  |  | NOT TRIED | CLOSE |"
    assert reason.startswith("- NOT TRIED: backend inductor compiles the graph into code that is not read; ")
    assert reason.endswith(": inductor_dense")
    assert main(["prove", "-k", "inductor_dense", "--table", "--json"]) == 2


def test_a_tried_cases_row_counts_its_outputs(capsys, monkeypatch):
    w, x = randn(4, 6), randn(4, 6)
    proof = compare(lambda w, x: (w + x, w - x), lambda w, x: (x + w, x - w), w, x)
    monkeypatch.setattr(
        command, "prove_case", lambda case, *_, **__: CaseProof(proof.verdict, proof, evaluated=1, case=case)
    )
    assert main(["prove", "-k", "experts_seq_world2", "--table"]) == 1
    row = capsys.readouterr().out.splitlines()[-1]
    assert row == "| experts_seq_world2 | deepseek_v3 tiny | 2 | 1 | 1 | 0 | 1 | NOT PROVED | EQUAL |"


def test_what_cannot_be_tried_counts_only_where_it_was_asked_for(capsys):
    assert main(["prove", "-k", "inductor_dense"]) == 3
    assert "inductor_dense: NOT TRIED: backend inductor" in capsys.readouterr().out


def test_a_step_that_cannot_be_traced_is_refused(case_file, capsys, monkeypatch):
    def fail(case, options, **_):
        raise TraceError("cannot trace")

    monkeypatch.setattr(command, "prove_case", fail)
    assert main(["prove", "--case", case_file("moe_seq")]) == 3
    assert "moe_seq: REFUSED: TraceError: cannot trace" in capsys.readouterr().out


def test_a_wrong_call_is_reported_before_anything_is_traced(case_file, capsys, tmp_path):
    assert main(["prove", "--case", case_file("moe_seq"), "-k", "nothing_like_this"]) == 2
    assert main(["prove", "-k", "moe_seq", "--extra-pass", f"{tmp_path}/none.py:f"]) == 2
    assert main(["prove", "-k", "nothing_like_this"]) == 2
