from __future__ import annotations

import os
import py_compile
from pathlib import Path

import pytest

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[2]

pytest_plugins = ["pytester"]

MY_TESTS = """
import pytest

SHORT = {"world_size": 2, "steps": 1, "control": "never", "device": "cpu"}

def test_my_loop_keeps_every_bit(bitproof_run):
    bitproof_run("loop_kept_gathered", candidate="bitproof.builtin_cases.examples.fsdp2_loop:bf16_reduce", **SHORT)

@pytest.mark.bitproof("loop_kept_gathered", **SHORT)
def test_a_result_is_looked_at(bitproof_result):
    assert bitproof_result.as_expected
    assert bitproof_result.verdict == "DIFFERENT"
"""


@pytest.fixture
def project(pytester, monkeypatch):
    """A folder of somebody's tests, whose pytest takes bitproof's plugin from its entry point."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    pytester.makeini("[pytest]\nfilterwarnings = error\naddopts = --strict-markers -p no:cacheprovider")
    return pytester


@pytest.mark.slow
def test_what_cases_came_to_stands_in_a_failed_tests_text(project):
    project.makepyfile(test_mine=MY_TESTS)
    done = project.runpytest_subprocess("-n", "1", "--bitproof-reports", "kept")
    done.assert_outcomes(failed=2)
    done.stdout.fnmatch_lines(
        [
            "loop_kept_gathered: DIFFERENT (grad, param, optimizer), expected EQUAL",
            "  first divergence: step 0, rank 0, grad *",
            "  to blame: chunk_cat of *",
            "  replay: bitproof run -k loop_kept_gathered --candidate *:bf16_reduce --steps 1 --world-size 2 *",
            "  report: kept/*/report.html",
            "E * AssertionError: *",
            "*- bitproof loop_kept_gathered -*",
            "loop_kept_gathered: EQUAL, expected EQUAL",
        ]
    )
    assert len([path for path in (project.path / "kept").iterdir() if not path.is_symlink()]) == 2


LOOP = """
import torch
import torch.distributed as dist

class plain:
    def __init__(self, case, mesh):
        self.weight = torch.ones(4, requires_grad=True)
        self.optimizer = torch.optim.SGD([self.weight], lr=0.1, momentum=0.9)
        self.factor = 1.0

    def step(self, index):
        loss = (self.weight * self.factor).square().sum()
        loss.backward()
        dist.all_reduce(self.weight.grad)
        yield "loss", "loss", loss.detach()
        yield "grad", "weight", self.weight.grad
        self.optimizer.step()
        yield "param", "weight", self.weight.detach()
        yield "optimizer", "weight.momentum", self.optimizer.state[self.weight]["momentum_buffer"]
        self.optimizer.zero_grad()

class scaled(plain):
    def step(self, index):
        import factors  # nothing else loads it
        self.factor = factors.FACTOR
        yield from super().step(index)
"""
MY_TEST = """
from bitproof import Case, Parallelism

MINE = Case(
    name="mine",
    family="mine",
    reference="loop:plain",
    candidate="loop:scaled",
    steps=1,
    parallelism=Parallelism(world_size=2, ep=1),
)

def test_my_loop(bitproof_run):
    bitproof_run(MINE, control="never", device="cpu")
"""


def test_an_edit_of_a_users_module_that_pythons_compiled_code_cannot_show_runs(project):
    """As within a second of the run before, or where a copy keeps times: by itself Python imports the old code."""
    project.makepyfile(loop=LOOP, factors="FACTOR = 1.0", test_mine=MY_TEST)
    factors = project.path / "factors.py"
    py_compile.compile(str(factors), invalidation_mode=py_compile.PycInvalidationMode.TIMESTAMP)
    before = factors.stat()
    factors.write_text(factors.read_text().replace("1.0", "2.0"))
    os.utime(factors, ns=(before.st_atime_ns, before.st_mtime_ns))
    done = project.runpytest_subprocess()
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(["mine: DIFFERENT (loss, grad, param, optimizer), expected EQUAL"])


def test_a_fixture_without_its_marker_says_what_it_needs(project):
    project.makepyfile("def test_mine(bitproof_result): pass")
    done = project.runpytest_subprocess()
    done.assert_outcomes(errors=1)
    done.stdout.fnmatch_lines(["bitproof_result needs a marker such as @pytest.mark.bitproof('moe_seq', steps=2)"])


def test_a_suite_that_asks_for_nothing_of_bitproof_loads_nothing_of_it(project):
    project.makepyfile("""
        import sys

        def test_what_is_loaded():
            assert not {"torch", "numpy", "bitproof.harness", "bitproof.reference"} & sys.modules.keys()
    """)
    project.runpytest_subprocess().assert_outcomes(passed=1)
    done = project.runpytest_subprocess("-p", "no:bitproof", "--bitproof-reports", "kept")
    assert "unrecognized arguments: --bitproof-reports" in done.stderr.str()


def test_a_suite_with_packages_named_as_folders_of_ours_has_both(project):
    for name in ("harness", "cases", "reference"):
        project.mkpydir(name).joinpath("theirs.py").write_text("")
    project.makepyfile("""
        import bitproof
        import cases.theirs, harness.theirs, reference.theirs

        def test_both():
            assert bitproof.CaseError.__module__ == "bitproof.harness.errors"
            assert "moe_seq" in {case.name for case in bitproof.cases()}
    """)
    project.runpytest_subprocess().assert_outcomes(passed=1)
