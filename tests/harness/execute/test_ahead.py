"""Cases proved in a process of their own, before any rank starts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cases import CASES
from harness.case import Parallelism
from harness.execute.ahead import Task, prove_ahead
from harness.records import ProofVerdict

pytestmark = [pytest.mark.ranks, pytest.mark.traces]


def small(name, **changes):
    case = CASES[name]
    model = replace(case.model, layers=1, dense_layers=0)
    return replace(case, model=model, parallelism=Parallelism(world_size=2, ep=2), **changes)


def test_each_case_has_its_outcome_and_what_cannot_be_tried_keeps_nothing_from_the_others(tmp_path):
    pass_that_prints = tmp_path / "passes.py"
    pass_that_prints.write_text("def loud(module, context):\n    print('in a pass')\n    return module\n")
    cases = replace(small("moe_seq"), candidate="mine.py:make"), small("moe_seq")
    task = Task(cases=cases, extra_passes=(f"{pass_that_prints}:loud",))
    untried, proved = prove_ahead(task, tmp_path / "logs" / "prove.log", timeout=300)
    assert (proved.verdict, proved.proved, proved.outputs, proved.unproved) == (ProofVerdict.PROVED, 19, 19, [])
    assert any("bits depend on nothing but" in text for text in proved.assumptions)
    assert (untried.verdict, untried.reason) == (ProofVerdict.NOT_TRIED, "system mine.py:make is not known as a graph")
    assert "in a pass" in (tmp_path / "logs" / "prove.log").read_text()


@pytest.mark.slow
def test_what_is_not_proved_is_named_with_what_the_sides_do_differently(tmp_path):
    [found] = prove_ahead(Task(cases=(small("early_accumulation"),)), tmp_path / "prove.log", timeout=300)
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
        found = list(prove_ahead(task, tmp_path / "prove.log", timeout))
        assert [outcome.verdict for outcome in found] == [ProofVerdict.NOT_TRIED] * 2
        assert all(outcome.reason.startswith(why) for outcome in found)
        assert all(outcome.reason.endswith("see logs/prove.log") for outcome in found)
