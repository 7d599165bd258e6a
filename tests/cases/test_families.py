from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import cases
from cases import backends, chunking, unequal
from harness.case import Case
from harness.errors import CaseError
from harness.select import select


def test_cases_are_listed_by_name_in_order():
    assert [case.name for case in cases.all_cases()] == [
        "transformer_batch",
        "moe_batch",
        "moe_seq",
        "unchunked",
        "early_accumulation",
        "chunked_vs_unchunked",
        "inductor_dense",
        "inductor_moe",
        "regional_inductor",
    ]
    assert all(cases.CASES[case.name] is case for case in cases.all_cases())


def test_two_cases_of_one_name_are_refused():
    twin = Case(name="moe_seq", family="other", reference="eager")
    with pytest.raises(CaseError) as error:
        cases.collect(chunking.CASES, [twin])
    assert str(error.value) == (
        "CaseError: two cases are named moe_seq\n"
        "  expected: a name of its own for every case\n"
        "  found: one in family chunking, one in family other"
    )


def test_the_main_cases_run_20_steps_on_8_ranks_in_pairs_of_experts():
    for case in chunking.CASES:
        assert (case.steps, case.parallelism.world_size, case.parallelism.ep) == (20, 8, 2)
        assert (case.expected, case.candidate) == ("EQUAL", "graph")
    assert [(case.chunking.dim, case.chunking.modules) for case in chunking.CASES[:3]] == [
        ("batch", "layers.*"),
        ("batch", "layers.*.moe"),
        ("seq", "layers.*.moe"),
    ]
    assert (chunking.unchunked.reference, chunking.unchunked.chunking) == ("eager", None)


def test_cases_that_must_differ_say_in_what():
    for case in unequal.CASES:
        assert (case.expected, case.differs) == ("DIFFERENT", ("grad", "param", "optimizer"))
        assert (case.steps, case.reference) == (2, "eager_chunked")
    assert unequal.early_accumulation.chunking.early_grad_accumulation
    assert unequal.chunked_vs_unchunked.candidate == "eager"


def test_cases_of_compiled_backends_state_a_bound():
    for case in backends.CASES:
        assert (case.expected, case.steps) == ("CLOSE", 2)
        assert 0 < case.close_within <= 0.5
        assert case.pipeline.backend != "fx"
    assert [case.name for case in backends.CASES if case.requires] == ["regional_inductor"]


@pytest.mark.parametrize(
    "expression", ["moe_seq", "moe and batch", "unequal", "chunking and not moe", "not (moe_seq or unequal)"]
)
def test_pytest_selects_the_same_cases_as_the_command_line(expression):
    root = Path(cases.__file__).parents[1]
    flags = f"--rootdir={root} --import-mode=importlib -p no:cacheprovider -q --collect-only".split()
    command = [sys.executable, "-m", "pytest", "cases", *flags, "-k", expression]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    found = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    ids = [line.split("[")[1].rstrip("]") for line in found.stdout.splitlines() if "[" in line]
    assert ids == [case.name for case in select(cases.all_cases(), expression)], found.stderr
