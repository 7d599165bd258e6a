from __future__ import annotations

import sys

from harness import doctor

ABLE = {"version": "2.13.0+cpu", "gloo": True, "nccl": True, "gpus": []}


def lines(probe):
    return [str(check) for check in doctor.check_torch(probe)]


def test_a_supported_torch_without_gpus_is_enough():
    assert lines(ABLE) == [
        "ok  torch: 2.13.0+cpu, supported: 2.11 to 2.15",
        "ok  gloo: available",
        "no  GPUs: none, or none that this torch can use; cases run on the CPU with gloo",
    ]
    assert doctor.summarize(list(doctor.check_torch(ABLE))).is_ok


def test_versions_at_the_ends_of_the_range_are_told_apart():
    for version, is_ok in {"2.10.2": False, "2.11.0": True, "2.15.1": True, "2.16.0a0": False, "dev": False}.items():
        assert next(doctor.check_torch(ABLE | {"version": version})).is_ok is is_ok


def test_eight_gpus_get_nccl_and_fewer_are_shared():
    assert lines(ABLE | {"gpus": ["H200"] * 8})[-1] == "ok  GPUs: 8 (H200), NCCL"
    assert lines(ABLE | {"gpus": ["H200"]})[-1] == "ok  GPUs: 1 (H200), gloo; 8 ranks share 1"


def test_a_torch_that_cannot_be_imported_is_told_with_a_fix():
    assert lines({"error": "ModuleNotFoundError: No module named 'torch'"}) == [
        "no  torch: ModuleNotFoundError: No module named 'torch'; fix: pip install torch, 2.11 to 2.15"
    ]


def test_a_torch_without_gloo_stops_the_main_cases():
    checks = list(doctor.check_torch(ABLE | {"gloo": False}))
    assert str(doctor.summarize(checks)).endswith("cannot run, because of: gloo")


def test_the_probe_reads_torch_in_another_process_and_survives_its_absence(monkeypatch):
    assert set(doctor.probe_torch()) == {"version", "gloo", "nccl", "gpus"}
    monkeypatch.setattr(doctor, "PROBE", "import no_such_module")
    assert doctor.probe_torch() == {"error": "ModuleNotFoundError: No module named 'no_such_module'"}
    monkeypatch.setattr(doctor, "PROBE", "print('no JSON')")
    assert "error" in doctor.probe_torch()


def test_too_little_memory_or_an_old_python_is_told():
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


def test_a_missing_compiler_is_told_and_stops_no_main_case(monkeypatch):
    check = doctor.check_compiler("no program g++ is found")
    assert str(check) == (
        "no  C++ compiler: no program g++ is found; the cases of family backends need it; "
        "fix: install g++, or name another compiler in CXX"
    )
    assert doctor.summarize([check]).is_ok
    monkeypatch.setenv("CXX", "clang++")
    assert str(doctor.check_compiler(None)) == "ok  C++ compiler: clang++ compiles"
