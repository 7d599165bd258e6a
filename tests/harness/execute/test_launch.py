"""Runs of toy systems over real gloo ranks: what is found, who is blamed, and what is left behind."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest

from bitproof.harness.case import Case, Parallelism
from bitproof.harness.errors import CaseError, UsageError
from bitproof.harness.execute.case_run import CaseRun
from bitproof.harness.execute.host import ranks
from bitproof.harness.execute.host.runners import run_ranks
from bitproof.harness.execute.launch import environment, record_system, run_cases
from bitproof.harness.execute.requests import RankSlots, RunAnswer
from bitproof.harness.execute.status_messages import Done
from bitproof.harness.files.folder_names import file_name
from bitproof.harness.machine.devices import Placement
from bitproof.harness.options import RunOptions
from bitproof.harness.records import CaseResult, Event, Verdict
from tests.harness.execute.test_requests import request
from tests.hosts import nothing_left_below_the_host, one_host
from tests.sweeps import sweep

pytestmark = pytest.mark.ranks

TOYS = "tests.harness.toy_systems:"
ROOT = Path(__file__).parents[3]


def toy_folder(name: str) -> str:
    """The folder of a toy system, in recordings, logs and baselines."""
    return file_name(f"tests.harness.toy_systems:{name}")


def toy(candidate="steady", *, name="toy", reference="steady", world_size=2):
    return Case(
        name=name,
        family="toy",
        reference=TOYS + reference,
        candidate=TOYS + candidate,
        steps=4,
        parallelism=Parallelism(world_size=world_size, ep=1),
    )


@contextlib.contextmanager
def nothing_left_behind(temporary):
    """Check that no process and no temporary file outlives what is done within. Processes carry a mark."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(temporary))
        patch.setenv("TMPDIR", str(temporary))
        patch.setenv("BITPROOF_TEST_MARK", str(temporary))
        yield
    limit = time.monotonic() + 20  # on a busy machine; it takes a tenth of a second
    while (left := marked_processes(str(temporary))) and time.monotonic() < limit:
        time.sleep(0.05)
    assert left == []
    assert [path.name for path in temporary.iterdir()] == []


@pytest.fixture(autouse=True)
def leaves_nothing_behind(tmp_path_factory):
    with nothing_left_behind(tmp_path_factory.mktemp("temporary")):
        yield


@dataclass
class Batch:
    """Cases that ran one after another on one host: what each came to, though those before it went wrong."""

    folder: Path
    results: dict[str, CaseResult]
    events: dict[str, list[Event]]

    def __getitem__(self, name: str) -> CaseResult:
        return self.results[name]


HANG = 8.0
"""Seconds that cases which hang are given: the host has imported torch before, and toys take a tenth of it."""

NEAR = {"near": "one_bit_off", "far": "ten_percent_off", "not_a_number": "nan_once", "same": "steady"}
TOGETHER = (
    *("steady", "raising", "killed", "leaving", "one_bit_off", "noisy", "other_shape", "spawning"),
    *("shy", "meeting_killed", "garbling", "tampering"),
)


ON_THREE = ("steady", "one_bit_off", "killed", "meeting_killed")
"""Where two ranks that are right are more than one: all of them count, and wait."""


@pytest.fixture(scope="module")
def batch(tmp_path_factory):
    folder, events = tmp_path_factory.mktemp("run"), []
    cases = [toy(name, name=name, world_size=3 if name in ON_THREE else 2) for name in TOGETHER]
    cases += [toy(name="alone", world_size=1)]
    cases += [toy(name, name=name, reference=name) for name in ("lossless", "meeting")]
    cases += [replace(toy(system, name=name), expected="CLOSE", close_within=0.01) for name, system in NEAR.items()]
    cases += [replace(toy("noisy", name="shaky"), expected="CLOSE", close_within=1e30)]
    cases += [replace(toy("other_shape", name="reshaped"), expected="CLOSE", close_within=1.0)]
    with nothing_left_behind(tmp_path_factory.mktemp("temporary")), pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOY_VICTIM", str(folder / "recordings" / "tampering" / toy_folder("steady")))
        options = RunOptions(device="cpu", timeout=60.0, control="when_different", verify=False)
        results = list(run_cases(cases, options, folder, events.append))
    by_case = {case.name: [e for e in events if e.case == case.name] for case in cases}
    return Batch(folder, {result.case.name: result for result in results}, by_case)


def marked_processes(mark):
    """Processes of this test, wherever in the tree they are: their environment tells."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get("BITPROOF_TEST_MARK") == mark:
                found.append(process.cmdline())
        except psutil.Error:
            continue
    return found


def run(tmp_path, case, on_event=lambda event: None, **options):
    defaults = {"device": "cpu", "timeout": 60.0, "control": "when_different"}
    [result] = run_cases([case], RunOptions(**defaults | options), tmp_path, on_event)
    return result


@pytest.mark.parametrize(("name", "world_size"), [("alone", 1), ("steady", 3)])
def test_two_systems_that_agree_are_equal(batch, name, world_size):
    result = batch[name]
    assert (result.verdict, result.error, result.first_divergence) == (Verdict.EQUAL, None, None)
    count = 4 * world_size
    assert result.compared == {"loss": count, "grad": count, "param": count, "buffer": 0, "optimizer": count}
    assert result.control == {"reference": None, "candidate": None}, "nothing differs"
    assert result.losses["reference"] == result.losses["candidate"] != []
    assert (result.device, result.backend) == ("cpu", "gloo")
    steps = [event.step for event in batch.events[name] if event.event == "step"]
    assert steps == [0, 1, 2, 3] * 2


def test_a_run_folder_holds_every_ranks_log_and_every_recording(batch):
    steady, other = (toy_folder(name) for name in ("steady", "one_bit_off"))
    recordings = batch.folder / "recordings" / "one_bit_off"
    assert {path.name for path in recordings.iterdir()} == {steady, f"{steady}.control", other, f"{other}.control"}
    assert {path.name for path in (batch.folder / "logs" / "one_bit_off" / other).iterdir()} == {
        f"rank{rank}{run}.log" for rank in range(3) for run in ("", ".control", ".replay1")
    }
    manifest = json.loads((recordings / other / "manifest.json").read_text())
    assert manifest["case"] == json.loads(json.dumps(batch["one_bit_off"].case.stated()))
    assert manifest["determinism"]["deterministic_algorithms"] is True
    assert manifest["determinism"]["num_threads"] == 1
    assert manifest["environment"]["OMP_NUM_THREADS"] == "1"
    assert manifest["ranks"] == [{"data_sha256": f"toy{rank}"} for rank in range(3)]


def test_one_ulp_is_close_where_the_case_states_a_bound(batch):
    result = batch["near"]
    assert (result.verdict, result.error, result.as_expected) == (Verdict.CLOSE, None, True)
    assert result.control == {"reference": "EQUAL", "candidate": "EQUAL"}
    assert result.closeness.is_within and 0 < result.closeness.largest_error < 1e-6
    assert result.closeness.largest.rank == 1
    assert sum(result.closeness.histogram["grad"].values()) == 4 * 2 * 6, "every element of every step and rank"
    assert result.closeness.histogram["grad"]["1"] >= 1
    assert result.first_divergence.name == "weight"
    assert not any(event.arm.startswith("replay") for event in batch.events["near"])


def test_ten_percent_is_different_and_the_first_tensor_beyond_the_bound_is_named(batch):
    result = batch["far"]
    assert (result.verdict, result.as_expected) == (Verdict.DIFFERENT, False)
    assert result.error.startswith(
        "the relative error of step 2, rank 1, grad weight is 0.1, beyond the case's bound of 0.01; "
    )
    assert 0.099 < result.closeness.largest_error < 0.101
    assert result.closeness.tensors_beyond >= 2


def test_a_nan_on_one_side_is_different_whatever_the_bound(batch):
    result = batch["not_a_number"]
    assert result.verdict == Verdict.DIFFERENT
    assert "step 2, rank 1, grad weight is infinite, beyond the case's bound of 0.01; 1 tensors are" in result.error
    assert result.closeness.largest_error is None
    assert result.closeness.histogram["grad"]["unlike"] == 1


def test_systems_that_agree_in_every_bit_are_equal_and_so_within_any_bound(batch):
    result = batch["same"]
    assert (result.verdict, result.as_expected, result.closeness) == (Verdict.EQUAL, True, None)


def test_a_system_that_differs_from_itself_is_never_close(batch):
    assert batch["shaky"].verdict == Verdict.NONDETERMINISTIC


def test_another_shape_is_different_whatever_the_bound(batch):
    assert (batch["reshaped"].verdict, batch["reshaped"].closeness) == (Verdict.DIFFERENT, None)


def test_values_are_kept_once_where_a_case_states_a_bound_and_nowhere_else(batch):
    files = {str(path.relative_to(batch.folder / "recordings")) for path in batch.folder.rglob("*.safetensors")}
    assert {file for file in files if file.startswith("near/")} == {
        f"near/{toy_folder(name)}/values/rank{rank}.safetensors"
        for name in ("steady", "one_bit_off")
        for rank in range(2)
    }
    assert not any(file.startswith(("one_bit_off/", "steady/")) for file in files)


def test_one_bit_is_blamed_at_its_step_rank_and_name(batch):
    result = batch["one_bit_off"]
    assert result.control == {"reference": "EQUAL", "candidate": "EQUAL"}
    assert (result.verdict, result.error) == (Verdict.DIFFERENT, None)
    first = result.first_divergence
    assert (first.step, first.rank, first.kind, first.name) == (2, 1, "grad", "weight")
    assert (first.tensor.elements_differing, first.tensor.elements, first.tensor.max_ulp) == (1, 6, 1)
    assert int(first.tensor.reference_bits, 16) ^ int(first.tensor.candidate_bits, 16) == 1
    assert (first.call.operator, first.call.rank, first.call.ranks) == ("bitwise_xor_.Scalar", 1, "1")
    assert first.call.source.startswith("tests/harness/toy_systems.py:")
    assert first.tensor.histogram == {"0": 5, "1": 1}
    assert first.tensor.samples == [([1, 2], first.tensor.reference_bits, first.tensor.candidate_bits)]


def test_a_result_lists_what_differs_where_and_its_logs(batch):
    result = batch["one_bit_off"]
    assert list(result.differing["grad"].items()) == [("weight", {"2": [1], "3": [1]})]
    assert result.differing_left_out == 0
    assert (batch["steady"].differing, batch["steady"].differing_left_out) == ({}, 0)
    for name in ("steady", "one_bit_off", "raising"):
        logs = batch[name].logs
        assert logs and all((batch.folder / path).is_file() for path in logs)
        assert Path(logs[0]).name == "rank0.log"
        assert set(logs) == {str(p.relative_to(batch.folder)) for p in (batch.folder / "logs" / name).rglob("*.log")}
    assert result.differing_kinds[0] == "grad"


def test_a_replay_takes_no_step_beyond_the_first_difference(batch):
    steps = [event for event in batch.events["one_bit_off"] if event.event == "step"]
    assert [event.step for event in steps if event.arm == "replay1"] == [0, 1, 2] * 2


def test_a_replay_that_fails_leaves_the_verdict_and_says_why_there_is_no_cause(batch):
    result = batch["shy"]
    assert result.verdict == Verdict.DIFFERENT
    assert result.error.startswith("a replay that looks for the cause failed; the verdict stands:\nRankError: rank ")
    assert "somebody is looking" in result.error
    assert (result.first_divergence.name, result.first_divergence.call) == ("weight", None)


def test_a_fault_is_put_into_the_candidate_alone(tmp_path, one_host):
    result = run(tmp_path, toy(), inject="flip-bit:grad=weight,rank=0,step=3,bit=31,element=5")
    first = result.first_divergence
    assert (first.step, first.rank, first.kind, first.name) == (3, 0, "grad", "weight")
    assert (
        first.tensor.elements_differing,
        int(first.tensor.reference_bits, 16) ^ int(first.tensor.candidate_bits, 16),
    ) == (1, 1 << 31)
    assert result.control == {"reference": "EQUAL", "candidate": "EQUAL"}


def test_a_fault_that_names_no_gradient_is_an_error_and_never_equal(tmp_path, one_host):
    result = run(tmp_path, toy(), inject="flip-bit:grad=wait,rank=0,step=3")
    assert result.verdict == Verdict.ERROR
    assert "UsageError: fault flip-bit:rank=0,step=3,grad=wait,bit=0,element=0 names no gradient" in result.error
    assert "expected: a gradient such as weight" in result.error


def test_a_fault_beyond_the_end_is_refused_before_anything_runs(tmp_path):
    with pytest.raises(UsageError, match="fault raise:rank=0,step=4 never fires in case toy"):
        run_cases([toy()], RunOptions(inject="raise:rank=0,step=4"), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_extra_pass_for_a_candidate_without_a_graph_is_refused_before_anything_runs(tmp_path):
    with pytest.raises(CaseError, match="the candidate of case toy has no graph for an extra pass"):
        run_cases([toy()], RunOptions(extra_passes=("tests.harness.toy_systems:steady",)), tmp_path)
    assert list(tmp_path.iterdir()) == []


class Clerk:
    """Answers nothing, and keeps what it was asked."""

    def __init__(self, folder):
        self.run_dir, self.work, self.asked = folder, folder, []

    def ask(self, request, timeout, on_event):
        self.asked.append(request)
        return RunAnswer()


def graph_options(tmp_path, case, **options):
    """What the host is told of graphs, by role and arm."""
    clerk = Clerk(tmp_path)
    case_run = CaseRun(case, Placement(), clerk, RunOptions(**options), lambda event: None)
    asked = [(role, arm) for role in ("reference", "candidate") for arm in ("first", "control")]
    for role, arm in asked:
        case_run.record(role, arm)
    return {key: request.graph_options for key, request in zip(asked, clerk.asked, strict=True)}


def test_extra_passes_go_into_every_run_of_the_candidate_alone(tmp_path):
    case = replace(toy(), reference="graph", candidate="graph")
    reported = graph_options(tmp_path, case, extra_passes=("a:b", "c:d"))
    assert {key: options.extra_passes for key, options in reported.items()} == {
        ("reference", "first"): (),
        ("reference", "control"): (),
        ("candidate", "first"): ("a:b", "c:d"),
        ("candidate", "control"): ("a:b", "c:d"),
    }
    assert {options.dump_dir for options in reported.values()} == {None}


def test_graphs_are_dumped_once_a_side_and_two_graphs_into_two_folders(tmp_path):
    def folders(reference):
        case = replace(toy(), reference=reference, candidate="graph")
        reported = graph_options(tmp_path, case, dump_graphs=True)
        assert {reported[role, "control"].dump_dir for role in ("reference", "candidate")} == {None}
        return [reported[role, "first"].dump_dir.name for role in ("reference", "candidate")]

    assert folders("eager") == ["toy", "toy"]
    assert folders("graph") == folders("joint") == ["toy.reference", "toy"]


def test_the_same_bytes_under_another_shape_differ(batch):
    result = batch["other_shape"]
    assert result.verdict == Verdict.DIFFERENT
    first = result.first_divergence
    assert (first.step, first.kind, first.tensor.reference_type, first.tensor.candidate_type) == (
        0,
        "param",
        "float32[2, 3]",
        "float32[6]",
    )


def test_a_system_that_differs_from_itself_is_nondeterministic(batch):
    result = batch["noisy"]
    assert (result.verdict, result.control) == (
        Verdict.NONDETERMINISTIC,
        {"reference": "EQUAL", "candidate": "DIFFERENT"},
    )


def test_without_a_control_a_replay_that_does_not_repeat_is_nondeterministic(tmp_path, one_host):
    result = run(tmp_path, toy("noisy"), control="never")
    assert result.verdict == Verdict.NONDETERMINISTIC
    assert result.error == (
        "a replay of candidate tests.harness.toy_systems:noisy did not reproduce step 0, rank 0, loss loss: "
        "its bits differ from the recorded ones"
    )
    assert result.control == {"reference": None, "candidate": "NONDETERMINISTIC"}
    first = result.first_divergence
    assert (first.between, first.call.operator, first.call.ranks) == ("candidate against itself", "add.Tensor", "0, 1")


def test_systems_that_show_nothing_are_never_equal(batch):
    assert batch["lossless"].verdict == Verdict.ERROR
    assert "system tests.harness.toy_systems:lossless showed nothing in step 0" in batch["lossless"].error


def test_a_rank_that_raises_is_blamed_with_its_traceback(batch):
    result = batch["raising"]
    assert result.verdict == Verdict.ERROR
    head, _, traceback = result.error.partition("\n\n")
    assert head == (
        "RankError: rank 1 of tests.harness.toy_systems:raising raised at step 2\n"
        "  found: ValueError: the toy is broken\n"
        f"  came from: logs/raising/{toy_folder('raising')}/rank1.log"
    )
    assert traceback.startswith("Traceback (most recent call last):")
    assert traceback.endswith("ValueError: the toy is broken")
    log = batch.folder / "logs" / "raising" / toy_folder("raising") / "rank1.log"
    assert "the toy is broken" in log.read_text()


def test_a_killed_rank_is_blamed_with_the_end_of_its_log(batch):
    result = batch["killed"]
    assert result.error == (
        "RankError: rank 1 of tests.harness.toy_systems:killed was killed by signal 9 (SIGKILL) at step 2\n"
        f"  came from: logs/killed/{toy_folder('killed')}/rank1.log\n"
        "\n"
        "a last word"
    )


def test_a_rank_that_leaves_without_a_word_is_blamed(batch):
    result = batch["leaving"]
    assert result.error.startswith(
        "RankError: rank 1 of tests.harness.toy_systems:leaving exited with status 0 before it finished at step 2\n"
    )


def met(folder, name, result):
    """How ranks met: what a result says of it, and what the candidate's manifest does."""
    recordings = folder / "recordings" / name
    manifest = json.loads((recordings / toy_folder("meeting") / "manifest.json").read_text())
    assert (manifest["backend"], manifest["collectives"]) == (result.backend, result.collectives)
    return result.verdict, result.backend, result.collectives


def test_ranks_meet_where_they_are_configured_to_and_the_report_says_where(batch, tmp_path, one_host):
    assert met(batch.folder, "meeting", batch["meeting"]) == (Verdict.EQUAL, "gloo", "shared")
    gloo = run(tmp_path, toy("meeting", reference="meeting"), collectives="gloo")
    assert met(tmp_path, "toy", gloo) == (Verdict.EQUAL, "gloo", "gloo")


def test_a_rank_that_is_killed_while_others_wait_in_shared_memory_is_blamed_and_not_they(batch):
    result = batch["meeting_killed"]
    assert (
        "rank 1 of tests.harness.toy_systems:meeting_killed was killed by signal 9 (SIGKILL) at step 2" in result.error
    )
    assert result.seconds.total < 30, "nobody waits for a time to be up"


@pytest.fixture(scope="module")
def hanging(tmp_path_factory):
    """Two cases that hang, by name: with ranks that meet in torch, and in shared memory."""
    folder = tmp_path_factory.mktemp("hanging")
    cases = [toy(name, name=name) for name in ("hanging", "meeting_hanging")]
    with one_host(), nothing_left_below_the_host():
        results = list(run_cases(cases, RunOptions(device="cpu", timeout=HANG, control="never"), folder))
    return {result.case.name: result for result in results}


def test_a_rank_that_writes_into_our_pipe_is_blamed(batch):
    assert (
        "RankError: rank 1 of tests.harness.toy_systems:garbling wrote into bitproof's own pipe at "
        in batch["garbling"].error
    )
    assert "found: no message of ours: b'\\xff{garbage}'" in batch["garbling"].error


def test_a_candidate_does_not_reach_what_the_reference_recorded(batch):
    assert (batch["tampering"].verdict, batch["tampering"].error) == (Verdict.EQUAL, None)
    assert not list((batch.folder / "recordings" / "tampering" / toy_folder("steady")).iterdir())


def test_what_leaves_its_session_ends_with_its_run(tmp_path):
    """The second case runs when nothing of the first is there any more."""
    mark = os.environ["BITPROOF_TEST_MARK"]
    seen = []
    cases = [toy("escaping", name="one"), toy(name="two")]
    for result in run_cases(cases, RunOptions(device="cpu", control="never"), tmp_path):
        assert result.verdict == Verdict.EQUAL
        seen.append([command for command in marked_processes(mark) if command[:1] == ["sleep"]])
    assert seen == [[], []]


def test_a_hung_rank_is_shown_by_its_stack(hanging):
    result = hanging["hanging"]
    assert result.seconds.total < 60
    head, _, stacks = result.error.partition("\n\n")
    assert (result.verdict, head) == (
        Verdict.ERROR,
        "RankError: tests.harness.toy_systems:hanging did not finish: the case ran longer than 8 s\n"
        "  expected: every rank to finish\n"
        "  found: ranks 0, 1 at step 2, unfinished\n"
        "  fix: see below where the ranks were; if they were only slow, give a longer --timeout",
    )
    rank_0, rank_1 = stacks.split("\n\n")
    assert "in all_gather" in rank_0
    assert re.match(r"rank 1, logs/.*rank1\.log:\n  File .*toy_systems\.py\", line \d+ in hang_here\n", rank_1)
    assert "harness/execute/host/main.py" not in stacks


@pytest.fixture
def hung(request, hanging, tmp_path):
    """What became of ranks that hang in a collective, over one transport."""
    if request.param == "shared":  # where ranks of one machine meet unless they are told otherwise
        return request.param, hanging["meeting_hanging"]
    return request.param, run(tmp_path, toy("meeting_hanging"), collectives=request.param, timeout=12.0)


@pytest.mark.parametrize("hung", ["shared", pytest.param("gloo", marks=pytest.mark.slow)], indirect=True)
def test_a_hang_is_shown_by_the_stacks_and_last_collectives_of_who_hangs_and_who_waits(hung):
    collectives, result = hung
    assert "found: ranks 0, 1 at step 2, unfinished" in result.error
    rank_0, rank_1 = result.error.partition("\n\n")[2].split("\n\n")
    waits, has_waited = (f"all_reduce {n} of group fsdp, 24 bytes of float32" for n in (3, 2))
    where = {"shared": "shared_memory", "gloo": "rank_order_group"}[collectives]
    assert re.match(
        rf"rank 0, logs/.*rank0\.log:\n  waits for {waits}\n  File .*{where}\.py\", line \d+ in wait\n", rank_0
    )
    assert "in all_reduce" in rank_0
    hung = r"File .*toy_systems\.py\", line \d+ in hang_here\n"
    assert re.match(rf"rank 1, logs/.*rank1\.log:\n  has waited for {has_waited}\n  {hung}", rank_1)


@pytest.mark.parametrize("kind", ["kill-rank", "raise"])
def test_a_fault_that_ends_a_rank_is_an_error_of_that_rank(tmp_path, one_host, kind):
    result = run(tmp_path, toy(), inject=f"{kind}:rank=1,step=1")
    assert result.error.startswith("RankError: rank 1 of tests.harness.toy_systems:steady ")
    assert result.seconds.reference > 0, "the reference ran unharmed"


def test_a_host_that_dies_makes_every_remaining_case_an_error(tmp_path):
    cases = [toy(name="before"), toy("host_killer", name="during"), toy(name="after")]
    before, during, after = run_cases(cases, RunOptions(device="cpu", control="never"), tmp_path)
    assert (before.verdict, during.verdict, after.verdict) == (Verdict.EQUAL, Verdict.ERROR, Verdict.ERROR)
    assert during.error == after.error
    assert during.error.startswith(
        "RankError: the process that starts the ranks was killed by signal 9 (SIGKILL)\n"
        "  came from: logs/host.log\n"
        "  fix: see its last output below"
    )


def test_a_host_that_cannot_start_shows_its_output(tmp_path, monkeypatch):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "torch.py").write_text("raise ImportError('no torch here')")
    monkeypatch.syspath_prepend(tmp_path / "broken")
    result = run(tmp_path, toy())
    assert result.verdict == Verdict.ERROR
    assert "exited with status 1" in result.error
    assert result.error.endswith("ImportError: no torch here")


@pytest.mark.parametrize("role", ["reference", "candidate"])
def test_an_unknown_system_is_refused_before_anything_runs(tmp_path, role):
    with pytest.raises(UsageError, match="unknown system 'nonsense'"):
        run_cases([toy(), replace(toy(), **{role: "nonsense"})], RunOptions(device="cpu"), tmp_path)
    with pytest.raises(UsageError, match="unknown system 'nonsense'"):
        record_system(toy(), "nonsense", RunOptions(device="cpu"), tmp_path / "out", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_cuda_where_there_is_none_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(CaseError, match="the case asks for CUDA, and this machine offers none"):
        list(run_cases([toy()], RunOptions(device="cuda"), tmp_path))


def test_one_system_can_be_recorded_alone(tmp_path, one_host):
    out = record_system(toy(), TOYS + "steady", RunOptions(device="cpu"), tmp_path / "out", tmp_path / "run")
    assert {path.name for path in out.iterdir()} == {"manifest.json", "digests.parquet"}


def test_children_that_a_rank_leaves_behind_are_ended(batch):
    assert batch["spawning"].verdict == Verdict.EQUAL  # the batch itself checks that nothing is left


def test_a_run_ends_with_its_last_rank_and_not_with_the_next_look_at_it(tmp_path, monkeypatch):
    monkeypatch.setattr(ranks, "POLL_SECONDS", 30.0)
    monkeypatch.setattr(ranks, "open_store", lambda job: None)
    monkeypatch.setattr(ranks, "run_rank", lambda job, rank, store, send, *shared: send(Done()))
    rank_slots = RankSlots(ranks=(0, 1), part="part{rank}", store=str(tmp_path / "store"))
    began = time.monotonic()
    for _ in range(5):
        end = run_ranks(request(tmp_path, case=toy(), timeout=600.0), rank_slots, lambda event: None, None)
        assert end.done == [Done(), Done()]
    assert time.monotonic() - began < 30


@pytest.mark.slow
def test_closing_the_results_early_ends_everything(tmp_path):
    results = run_cases([toy(name="one"), toy(name="two")], RunOptions(device="cpu", control="never"), tmp_path)
    next(results)
    results.close()


def test_results_never_asked_for_cost_only_the_host_that_was_started(tmp_path):
    run_cases([toy()], RunOptions(device="cpu"), tmp_path).close()


def test_an_interrupt_in_the_middle_of_a_run_ends_everything(tmp_path):
    def interrupt(event):
        if event.event == "step":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, toy(), interrupt)


@pytest.mark.parametrize("number", sweep([signal.SIGTERM, signal.SIGKILL], signal.SIGKILL))
def test_a_signal_to_the_command_ends_everything(tmp_path, number, leaves_nothing_behind):
    code = (
        "import sys; from pathlib import Path; from bitproof.harness.execute.launch import *\n"
        "from tests.harness.execute.test_launch import toy\n"
        "show = lambda event: print(event.event, event.step, flush=True)\n"
        "list(run_cases([toy('escaped')], RunOptions(device='cpu'), Path(sys.argv[1]), show))\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        watchdog = threading.Timer(60, process.kill)
        watchdog.start()
        seen = 0
        for line in process.stdout:
            seen += line == "step 2\n"
            if seen == 2:  # the reference's, then the hanging candidate's
                break
        time.sleep(0.3)
        process.send_signal(number)
        process.stdout.read()
        code = process.wait()
        watchdog.cancel()
    assert seen == 2
    assert code == (143 if number == signal.SIGTERM else -signal.SIGKILL)
    limit = time.monotonic() + 20  # a command that was killed leaves it to the host to remove the folder
    while list(Path(os.environ["TMPDIR"]).iterdir()) and time.monotonic() < limit:
        time.sleep(0.05)


@pytest.mark.slow
def test_without_a_compiler_a_case_that_compiles_is_unverified_and_says_why(tmp_path, monkeypatch):
    from bitproof.builtin_cases.backends import inductor_dense

    monkeypatch.setenv("CXX", "/nonexistent")
    small = replace(inductor_dense.model, layers=1, dense_layers=1)
    result = run(tmp_path, replace(inductor_dense, steps=1, model=small, parallelism=Parallelism(world_size=2)))
    assert (result.verdict, result.as_expected) == (Verdict.UNVERIFIED, False)
    assert result.error.startswith("MachineError: Inductor cannot compile for this CPU without a C++ compiler\n")
    assert "found: no program /nonexistent is found" in result.error


def test_the_command_process_loads_no_torch(tmp_path):
    code = "import sys, bitproof.harness.execute.launch, bitproof.harness.localize.search"
    code += "; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_the_environment_names_the_commit_that_ci_does_else_the_folders_where_it_has_one(monkeypatch, tmp_path):
    monkeypatch.setenv("GITHUB_SHA", "c0ffee")
    assert environment("cpu")["commit"] == "c0ffee"
    monkeypatch.delenv("GITHUB_SHA")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert "commit" not in environment("cpu")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "one"]):
        subprocess.run([*git, *words], check=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert environment("cpu")["commit"] == head
