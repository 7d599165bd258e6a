from __future__ import annotations

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
