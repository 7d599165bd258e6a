"""Cases proved in a process of their own, before any rank starts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bitproof.builtin_cases import CASES
from bitproof.harness.case import Parallelism
from bitproof.harness.case.case_file import case_text
from bitproof.harness.cli import main
from bitproof.harness.powers.proofs.preflight import Task, preflight_proofs
from bitproof.harness.powers.proofs.records import ProofVerdict
from bitproof.harness.powers.proofs.report import proof_of
from bitproof.harness.report import json as report_json

pytestmark = [pytest.mark.ranks, pytest.mark.traces]


def small(name, **changes):
    case = CASES[name]
    model = replace(case.model, layers=1, dense_layers=0)
    return replace(case, model=model, parallelism=Parallelism(world_size=2, ep=2), **changes)


@pytest.mark.slow
def test_each_case_has_its_outcome_and_what_cannot_be_tried_keeps_nothing_from_the_others(tmp_path):
    pass_that_prints = tmp_path / "passes.py"
    pass_that_prints.write_text("def loud(module, context):\n    print('in a pass')\n    return module\n")
    cases = replace(small("moe_seq"), candidate="mine.py:make"), small("moe_seq")
    task = Task(cases=cases, extra_passes=(f"{pass_that_prints}:loud",))
    untried, proved = preflight_proofs(task, tmp_path / "logs" / "prove.log", timeout=300)
    assert (proved.verdict, proved.proved, proved.outputs, proved.unproved) == (ProofVerdict.PROVED, 19, 19, [])
    assert any("bits depend on arguments" in text for text in proved.assumptions)
    assert (untried.verdict, untried.reason) == (ProofVerdict.NOT_TRIED, "system mine.py:make is not known as a graph")
    assert "in a pass" in (tmp_path / "logs" / "prove.log").read_text()


@pytest.mark.slow
def test_what_is_not_proved_is_named_with_what_the_sides_do_differently(tmp_path):
    [found] = preflight_proofs(Task(cases=(small("early_accumulation"),)), tmp_path / "prove.log", timeout=300)
    assert found.verdict == ProofVerdict.NOT_PROVED
    assert found.not_proved == len(found.unproved) > 0
    assert any("adds here: aten.add.Tensor" in line for line in found.first)


@pytest.mark.slow
def test_a_proof_that_takes_too_long_or_whose_process_dies_leaves_its_cases_untried(tmp_path):
    hangs, dies = tmp_path / "hangs.py", tmp_path / "dies.py"
    hangs.write_text("import time\n\n\ndef sleep(module, context):\n    time.sleep(600)\n")
    dies.write_text("import os\n\n\ndef leave(module, context):\n    os._exit(7)\n")
    for name, timeout, why in (
        (f"{hangs}:sleep", 25, "it took longer than 25 s"),
        (f"{dies}:leave", 300, "its process"),
    ):
        task = Task(cases=(small("moe_seq"),) * 2, extra_passes=(name,))
        found = list(preflight_proofs(task, tmp_path / "prove.log", timeout))
        assert [outcome.verdict for outcome in found] == [ProofVerdict.NOT_TRIED] * 2
        assert all(outcome.reason.startswith(why) for outcome in found)
        assert all(outcome.reason.endswith("see logs/prove.log") for outcome in found)


@pytest.mark.slow
def test_a_pass_that_puts_another_kernel_in_torchs_place_is_refused_by_its_name(tmp_path, capfd):
    """Both sides would call silu on equal tensors, which is all that a proof knows; the candidate has another one."""
    own = tmp_path / "own.py"
    own.write_text(
        "import torch\n\nlibrary = torch.library.Library('aten', 'IMPL')\n\n\n"
        "def other_silu(module, context):\n"
        "    library.impl('silu', lambda x: x * torch.sigmoid(x), 'CPU')\n    return module\n"
    )
    case = tmp_path / "case.json"
    case.write_text(case_text(small("moe_seq", steps=1)))
    options = ["--case", str(case), "--prove-first", "--no-control", "--device", "cpu"]
    options += ["--extra-pass", f"{own}:other_silu", "--report-dir", str(tmp_path / "reports")]
    assert main(["run", *options]) == 3
    assert "moe_seq: REFUSED: PassError: extra pass other_silu changes what holds" in capfd.readouterr().out
    [result] = report_json.read(tmp_path / "reports" / "latest" / "report.json").cases
    assert (result.verdict, proof_of(result).verdict) == ("ERROR", "REFUSED")
    assert "aten/silu/CPU" in result.error
