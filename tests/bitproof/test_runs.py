from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import bitproof
from bitproof import Case, CaseError, RecordingError, UsageError, Verdict
from bitproof.harness import errors
from bitproof.harness.cli import main
from bitproof.harness.report import json as report_json
from tests.harness import toy_systems
from tests.hosts import one_host

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[2]
TOYS = "tests.harness.toy_systems"
READ_OF_DOCS = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs/reference/systems.md").read_text(), re.M | re.S)[:2]
SECOND = """
import bitproof

def watched(**options):
    run = Trainer(**options)
    return bitproof.watch(run.train, model=run.model, optimizer=run.optimizer)

Trainer.plain = staticmethod(lambda case, mesh: watched())
Trainer.fast = staticmethod(lambda case, mesh: watched(lr=2e-3))
"""
CASE = Case(
    name="toy",
    family="test",
    reference=f"{TOYS}:steady",
    candidate=f"{TOYS}:steady",
    steps=1,
    parallelism=bitproof.Parallelism(world_size=2, ep=1),
)


@pytest.fixture(scope="module")
def flipped(tmp_path_factory):
    """A run of two steady systems, one of them with a flipped bit, and what it told meanwhile."""
    events = []
    with one_host():
        run = bitproof.run(
            CASE,
            inject="flip-bit:grad=weight,rank=1,step=0",
            names={"*": "*"},
            control="never",
            device="cpu",
            report_dir=tmp_path_factory.mktemp("flipped"),
            on_event=events.append,
        )
    assert {event.event for event in events} >= {"start", "step"}
    return run


def test_every_public_name_is_there_and_documented():
    for name in bitproof.__all__:
        assert getattr(bitproof, name).__doc__, name
    assert set(bitproof.__all__) <= set(dir(bitproof))
    kinds = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)}
    assert kinds <= set(bitproof.__all__), "whoever calls can catch what is raised"
    with pytest.raises(AttributeError, match="module 'bitproof' has no attribute 'no_such_name'"):
        _ = bitproof.no_such_name


def test_importing_bitproof_and_every_name_but_four_that_take_tensors_loads_no_torch():
    code = (
        "import sys, bitproof; ours = {'harness', 'reference', 'cases'} & sys.modules.keys(); "
        "of_tensors = {'Mesh', 'PairProof', 'keeps_bits', 'prove_equal'}; "
        "[getattr(bitproof, name) for name in bitproof.__all__ if name not in of_tensors]; "
        "print('torch' in sys.modules, ours)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert answer.stdout == "False set()\n"


def test_functions_are_run_by_file_and_name_and_a_frame_has_what_was_compared(one_host, tmp_path):
    options = {"world_size": 2, "steps": 1, "control": "never", "device": "cpu", "report_dir": tmp_path}
    options["inject"] = "flip-bit:grad=weight,rank=1,step=0"
    run = bitproof.run(reference=toy_systems.steady, candidate=toy_systems.steady, **options)
    case = run.result.case
    assert (case.name, case.reference) == ("own_steady", "tests/harness/toy_systems.py:steady")
    assert (case.family, case.parallelism.ep, run.verdict) == ("toy_systems", 1, Verdict.DIFFERENT)


def test_a_frame_has_a_row_a_tensor_and_says_which_differ(one_host, tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text(READ_OF_DOCS[0] + SECOND)
    options = {"world_size": 2, "steps": 1, "device": "cpu", "report_dir": tmp_path / "reports"}
    run = bitproof.run(reference=f"{mine}:Trainer.plain", candidate=f"{mine}:Trainer.fast", **options)
    frame = run.frame()
    assert len(frame) == sum(run.result.compared.values())
    assert (~frame.equal).sum() == sum(run.result.mismatched.values()) > 0
    first = frame[~frame.equal].iloc[0]
    assert (first.step, first["rank"], first["kind"], first["name"]) == (0, 0, "param", "weight")
    assert first.digest_reference != first.digest_candidate and first.shape_reference == (8, 8)


@pytest.mark.slow
def test_the_page_on_own_systems_begins_with_lines_that_run(tmp_path):
    for name, text in zip(("my_trainer.py", "check.py"), READ_OF_DOCS, strict=True):
        (tmp_path / name).write_text(text)
    answer = subprocess.run([sys.executable, "check.py"], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert answer.stdout.startswith("own_plain_against_foreach: EQUAL, expected EQUAL\n"), answer.stdout


def test_a_run_of_what_no_rank_finds_again_or_of_one_system_is_refused_before_anything_runs(tmp_path):
    with pytest.raises(UsageError, match="a system was given that no rank can find again: it has no name"):
        bitproof.run(reference=lambda case, mesh: None, candidate=toy_systems.steady, report_dir=tmp_path)
    with pytest.raises(UsageError, match="without a case, a run compares two systems"):
        bitproof.run(candidate=toy_systems.steady, report_dir=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_script_without_a_guard_is_reported_so_and_does_not_run_itself(tmp_path):
    script = tmp_path / "mine.py"
    script.write_text(
        "import bitproof\n\ndef factory(case, mesh):\n    ...\n\n"
        "print(bitproof.run(reference=factory, candidate=factory, world_size=1, steps=1, device='cpu'))\n"
    )
    answer = subprocess.run([sys.executable, "mine.py"], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert "own_factory: ERROR" in answer.stdout
    assert "bitproof.run was called by a file while a rank loaded it" in answer.stdout
    assert "if __name__ == '__main__':" in answer.stdout


def test_a_failed_assertion_shows_the_callers_line_alone(tmp_path):
    (tmp_path / "test_mine.py").write_text(
        "import bitproof\n\ndef test_bits():\n    bitproof.assert_bitwise_equal(1.0, 2.0)\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    answer = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert "test_mine.py:4: AssertionError" in answer.stdout and "bitwise.py" not in answer.stdout


def test_cases_are_selected_by_expression():
    names = [case.name for case in bitproof.cases("moe_seq or moe_batch")]
    assert names == ["moe_batch", "moe_seq"]
    assert len(bitproof.cases()) > len(bitproof.cases("trainers")) > 2
    with pytest.raises(UsageError, match="no case matches"):
        bitproof.cases("nothing_like_that")


def test_a_run_that_differs_says_where_and_how_to_replay_it(flipped, tmp_path, monkeypatch, one_host):
    assert (flipped.verdict, flipped.as_expected) == (Verdict.DIFFERENT, False)
    where = flipped.first_divergence
    assert where is not None and (where.step, where.rank, where.kind, where.name) == (0, 1, "grad", "weight")
    first, second, *_, replay, report = str(flipped).splitlines()
    assert first == "toy: DIFFERENT (grad, param, optimizer), expected EQUAL"
    assert second == "  first divergence: step 0, rank 1, grad weight"
    assert report == f"  report: {flipped.folder / 'report.html'}"
    with pytest.raises(AssertionError) as caught:
        bitproof.assert_as_expected(flipped)
    page = flipped._repr_html_()
    assert page.startswith("<b>toy: DIFFERENT") and ">to blame</th>" in page
    assert f"href='{flipped.folder / 'report.html'}'" in page
    assert str(caught.value) == str(flipped)
    written = report_json.read(flipped.folder / "report.json")
    assert written.cases[0].verdict == Verdict.DIFFERENT
    assert (written.environment["device"], written.environment["backend"]) == ("cpu", "gloo")
    command = shlex.split(replay.removeprefix("  replay: "))
    assert command[:2] == ["bitproof", "run"] and {"case.json", "names.json"} <= {Path(part).name for part in command}
    monkeypatch.chdir(ROOT)
    assert main([*command[1:], "--report-dir", str(tmp_path)]) == 1


def test_every_call_is_asked_for_as_on_the_command_line(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "bitproof.harness.execute.launch.run_cases", lambda cases, options, *_: asked.append(options) or []
    )
    monkeypatch.setattr("bitproof.harness.execute.launch.environment", lambda device: {})
    for given in ({}, {"every_call": True}):
        run = bitproof.run(CASE, report_dir=tmp_path, **given)
        assert ("--every-call" in run.report.options) is bool(given)
    assert [options.every_call for options in asked] == [False, True]


def test_a_call_that_is_wrong_raises_and_leaves_nothing(tmp_path):
    with pytest.raises(UsageError, match="no such case"):
        bitproof.run("moe_sequence", report_dir=tmp_path)
    with pytest.raises(UsageError, match="there is no such data file"):
        bitproof.run(CASE, data="no/such/file", report_dir=tmp_path)
    with pytest.raises(UsageError, match="unknown system 'graphs'"):
        bitproof.run(CASE, candidate="graphs", report_dir=tmp_path)
    with pytest.raises(CaseError, match="does not chunk"):
        bitproof.run(CASE, early_grad_accumulation=True, report_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_recordings_are_made_and_compared(flipped, tmp_path, capfd, one_host):
    system = CASE.candidate
    alone = bitproof.record(CASE, system, tmp_path / "a", values=["grad"], device="cpu", report_dir=tmp_path / "logs")
    reference, candidate = sorted((flipped.folder / "recordings" / "toy").iterdir())
    assert bitproof.diff(reference, alone).verdict == Verdict.EQUAL
    found = bitproof.diff(alone, candidate)
    assert found.verdict == Verdict.DIFFERENT and found.mismatched["grad"] == 1
    assert found.first_divergence is not None and found.first_divergence.name == "weight"
    assert list((tmp_path / "logs").iterdir()) == [], "what left empty logs alone has no folder"
    assert capfd.readouterr().out == ""
    (alone / "digests.parquet").write_bytes(b"PAR1")
    with pytest.raises(RecordingError):
        bitproof.diff(alone, reference)


def test_a_recording_is_refused_where_it_could_not_be_used(tmp_path):
    with pytest.raises(UsageError, match="there is no such recording"):
        bitproof.diff(tmp_path / "a", tmp_path / "b")
    with pytest.raises(UsageError, match="would overwrite"):
        bitproof.record(CASE, "eager", tmp_path, report_dir=tmp_path / "logs")
    with pytest.raises(UsageError, match="unknown system 'graphs'"):
        bitproof.record(CASE, "graphs", tmp_path / "a", report_dir=tmp_path / "logs")
    assert not (tmp_path / "a").exists() and list((tmp_path / "logs").iterdir()) == []


def test_a_precompiled_step_is_read_or_refused_as_on_the_command_line(tmp_path, one_host):
    done = bitproof.run(
        "moe_seq", world_size=2, steps=1, precompiled=tmp_path / "none", device="cpu", report_dir=tmp_path / "reports"
    )
    assert done.verdict == Verdict.ERROR and "there is no precompiled step" in done.result.error
    assert f"--precompiled {tmp_path / 'none'}" in str(done)
    with pytest.raises(UsageError, match="--trust-compiled"):
        bitproof.run("moe_seq", trust_compiled=True, report_dir=tmp_path / "reports")
