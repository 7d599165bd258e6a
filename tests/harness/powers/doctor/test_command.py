from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from bitproof.builtin_cases import CASES
from bitproof.harness.commands import precompile
from bitproof.harness.errors import ArtifactError
from bitproof.harness.powers.doctor import command as doctor
from bitproof.harness.processes import started
from bitproof.harness.records import CaseResult, CaseSeconds, Verdict

HOST_WITH_A_DEVICE = Path(__file__).parents[2] / "execute" / "host_with_a_device.py"
TESTED = "2.11.0, 2.12.1, 2.13.0, 2.14.1, 2.15.0"
ABLE = doctor.Torch(version="2.13.0+cpu", gloo=True, nccl=True, gpus=[])


def lines(probe):
    return [str(check) for check in doctor.check_torch(probe)]


def test_a_supported_torch_without_gpus_is_enough():
    assert lines(ABLE) == [
        f"ok  torch: 2.13.0+cpu, one of the tested {TESTED}; supported: 2.11 or later",
        "ok  gloo: available",
        "no  GPUs: none, or none that this torch can use; cases run on the CPU with gloo",
    ]
    assert doctor.summarize(list(doctor.check_torch(ABLE))).is_ok


def test_a_version_that_is_too_old_is_refused_and_a_nightly_is_not():
    for version, is_ok in {
        "2.10.2": False,
        "2.11.0": True,
        "2.15.1": True,
        "2.16.0.dev20261101": True,
        "dev": False,
    }.items():
        assert next(doctor.check_torch(replace(ABLE, version=version))).is_ok is is_ok


def test_a_release_within_the_range_that_was_never_tested_is_reported():
    assert lines(replace(ABLE, version="2.14.0"))[0] == (
        f"ok  torch: 2.14.0, none of the tested {TESTED}; supported: 2.11 or later"
    )


def result_of(name, verdict, error=None):
    facts = {"steps": 1, "world_size": 2, "device": "cpu", "backend": "gloo", "seconds": CaseSeconds(total=5.0)}
    return CaseResult(case=CASES[name], verdict=verdict, error=error, **facts)


def test_a_trial_whose_cases_are_equal_says_what_was_tried():
    results = [result_of("moe_batch", Verdict.EQUAL), result_of("moe_seq", Verdict.EQUAL)]
    assert str(doctor.check_trial(results)) == (
        "ok  trial: moe_batch and moe_seq in small are EQUAL, 10 s: traced, 2 ranks forked, "
        "1 step of eager_chunked and graph"
    )


def test_a_case_that_fails_in_the_trial_is_named_with_its_error_and_stops_the_main_cases():
    error = "TraceError: cannot trace\n  found: u0\n\nTraceback (most recent call last):\n  a line"
    check = doctor.check_trial([result_of("moe_batch", Verdict.EQUAL), result_of("moe_seq", Verdict.ERROR, error)])
    assert str(check) == (
        f"no  trial: moe_seq in small: ERROR, TraceError: cannot trace, found: u0; "
        f"fix: install a tested torch: {TESTED}"
    )
    assert str(doctor.summarize([check])).endswith("cannot run, because of: trial")


@pytest.mark.ranks
@pytest.mark.slow
def test_the_trial_takes_two_small_cases_through_both_systems_also_where_torch_knows_of_a_device(monkeypatch):
    """There the second has an error, should the host have run autograd for the first."""
    monkeypatch.setattr(started, "START", str(HOST_WITH_A_DEVICE))
    results = doctor.run_trial()
    assert [(result.case.name, result.verdict, result.error) for result in results] == [
        ("moe_batch", Verdict.EQUAL, None),
        ("moe_seq", Verdict.EQUAL, None),
    ]
    assert all(result.compared["loss"] == 2 and result.seconds.trace > 0 for result in results)


@pytest.mark.ranks
def test_a_trial_that_hangs_is_ended(monkeypatch, one_host):
    monkeypatch.setattr(doctor, "TRIAL_SECONDS", 1.0)
    monkeypatch.setattr(doctor, "TRIAL_CASES", ("moe_seq",))
    slow = replace(CASES["moe_seq"], model=replace(CASES["moe_seq"].model, flavor="debugmodel"))
    monkeypatch.setitem(CASES, "moe_seq", slow)
    began = time.monotonic()
    check = doctor.check_trial(doctor.run_trial())
    assert time.monotonic() - began < 60
    assert "moe_seq in small: ERROR, RankError: " in str(check)
    assert "ran longer than" in str(check)


def test_a_step_that_is_another_on_another_rank_is_reported_before_anything_runs(monkeypatch):
    assert str(doctor.check_ranks_code(None)) == (
        "ok  one code: a small step is the same on the first rank and the last, whose coordinates all differ"
    )

    def fail(case, out, options):
        assert case.parallelism.tp == case.parallelism.ep == 2
        raise ArtifactError("the step is not the same on every rank", found="rank 3 has 1")

    monkeypatch.setattr(precompile, "make", fail)
    check = doctor.check_ranks_code(doctor.trace_as_two_ranks())
    assert str(check) == (
        "no  one code: ArtifactError: the step is not the same on every rank, found: rank 3 has 1; "
        "fix: read the coordinate from a buffer that each rank owns"
    )
    assert str(doctor.summarize([check])).endswith("cannot run, because of: one code")
    monkeypatch.setattr(precompile, "make", lambda *arguments: None)
    assert doctor.trace_as_two_ranks() is None


def test_nothing_is_tried_with_a_torch_that_cannot_do(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "probe_torch", lambda: replace(ABLE, gloo=False))
    monkeypatch.setattr(doctor, "run_trial", lambda: 1 // 0)
    assert [check.name for check in doctor.examine(tmp_path)][-1] == "GPUs"


def gpus(needs_gpus=False, **facts):
    return list(doctor.check_torch(replace(ABLE, **facts), needs_gpus=needs_gpus))[-1]


def test_eight_gpus_get_nccl_and_fewer_learn_how_they_can_be_used():
    assert str(gpus(gpus=["H200"] * 8)) == "ok  GPUs: 8 (H200), NCCL"
    assert str(gpus(gpus=["H200"])) == (
        "ok  GPUs: 1 (H200), for 8 ranks: --device cuda takes --world-size 1, or --share-gpus over gloo"
    )


def test_gpus_without_nccl_stop_the_main_cases():
    check = gpus(gpus=["H200"] * 8, nccl=False)
    assert str(check) == (
        "no  GPUs: 8 (H200), and this torch has no NCCL: no run would test what joins them; "
        "fix: install a build of torch with NCCL"
    )
    assert not doctor.summarize([check]).is_ok


@pytest.mark.parametrize(("num_gpus", "is_ok"), [(8, True), (7, False), (0, False)])
def test_where_runs_are_to_take_place_on_gpus_each_rank_needs_one(num_gpus, is_ok):
    assert doctor.summarize([gpus(gpus=["H200"] * num_gpus)]).is_ok
    assert doctor.summarize([gpus(gpus=["H200"] * num_gpus, needs_gpus=True)]).is_ok is is_ok


def test_a_torch_that_cannot_be_imported_is_reported_with_a_fix():
    assert lines("ModuleNotFoundError: No module named 'torch'") == [
        "no  torch: ModuleNotFoundError: No module named 'torch'; fix: pip install torch, 2.11 or later"
    ]


def test_a_torch_without_gloo_stops_the_main_cases():
    checks = list(doctor.check_torch(replace(ABLE, gloo=False)))
    assert str(doctor.summarize(checks)).endswith("cannot run, because of: gloo")


@pytest.mark.ranks
def test_the_probe_reads_torch_in_another_process_and_survives_its_absence(monkeypatch):
    assert isinstance(doctor.probe_torch(), doctor.Torch)
    monkeypatch.setattr(doctor, "PROBE", "import no_such_module")
    assert doctor.probe_torch() == "ModuleNotFoundError: No module named 'no_such_module'"
    monkeypatch.setattr(doctor, "PROBE", "print('no JSON')")
    assert str(doctor.probe_torch()).startswith("asking it failed: ")


def test_too_little_memory_or_an_old_python_is_reported():
    assert str(doctor.check_memory(1.0)) == (
        "no  memory: 1.0 GiB available, 4 needed for 8 ranks; "
        "fix: end other programs, or use fewer ranks with --world-size"
    )
    assert doctor.check_memory(24.0).is_ok
    assert str(doctor.check_python((3, 10, 1))) == "no  Python: 3.10.1; fix: use Python 3.11 or newer"
    assert doctor.check_python(sys.version_info[:3]).is_ok


def test_a_report_folder_is_checked_without_making_it(tmp_path):
    assert doctor.check_report_dir(tmp_path / "new" / "reports").is_ok
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    check = doctor.check_report_dir(tmp_path / "file" / "reports")
    assert not check.is_ok
    assert str(check).startswith(f"no  report folder: {tmp_path / 'file' / 'reports'}: Not a directory; fix: ")


def test_what_no_main_case_needs_stops_nothing():
    check = doctor.check_program("Chromium", ("no-such-program",), "tests of HTML reports", "install chromium")
    assert str(check) == "no  Chromium: none found, needed only by tests of HTML reports; fix: install chromium"
    assert doctor.summarize([check]).is_ok


def test_a_missing_compiler_is_reported_and_stops_no_main_case(monkeypatch):
    check = doctor.check_compiler("no program g++ is found")
    assert str(check) == (
        "no  C++ compiler: no program g++ is found; the cases of family backends need it; "
        "fix: install g++, or name another compiler in CXX"
    )
    assert doctor.summarize([check]).is_ok
    monkeypatch.setenv("CXX", "clang++")
    assert str(doctor.check_compiler(None)) == "ok  C++ compiler: clang++ compiles"
