"""Cases side by side: the same results as in turns, told one at a time, and nothing left behind however it ends."""

import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from bitproof.builtin_cases.chunking import transformer_batch
from bitproof.harness.case import Batch, Model, Parallelism
from bitproof.harness.errors import UsageError
from bitproof.harness.execute.launch import run_cases
from bitproof.harness.options import RunOptions
from bitproof.harness.powers.side_by_side import concurrency
from bitproof.harness.powers.side_by_side.concurrency import HOST_BYTES, RANK_BYTES, Concurrency, plan_concurrency
from bitproof.harness.records import Verdict
from tests.harness.execute.test_launch import ROOT, nothing_left_behind, toy
from tests.hosts import one_host

EAGER = replace(
    transformer_batch,
    steps=1,
    reference="eager_chunked",
    candidate="eager_chunked",
    parallelism=Parallelism(world_size=1, ep=1),
    batch=Batch(sequences=2, seq_len=2),
    model=Model(layers=1, dense_layers=1, dim=8, heads=1),
)
CASES = [toy("one_bit_off", name="bad"), toy("raising", name="broken"), toy(name="good")]


@pytest.fixture
def machine(monkeypatch):
    """Say what the machine has."""

    def has(cores, memory=None, gpus=()):
        monkeypatch.setattr(concurrency, "cores_for_runs", lambda: cores)
        monkeypatch.setattr(concurrency, "free_memory", lambda: memory)
        monkeypatch.setattr(concurrency, "gpu_models", lambda: list(gpus))

    return has


def planned(cases=CASES, **options):
    return plan_concurrency(cases, RunOptions(**options)).num_cases


def test_as_many_cases_go_at_once_as_are_asked_for_and_by_default_one(machine):
    machine(cores=2)
    assert planned() == 1
    assert planned(jobs=2) == 2
    assert planned(jobs=9) == 3, "there are no more"


def test_with_auto_each_rank_has_a_core(machine):
    eights = [replace(EAGER, parallelism=Parallelism(world_size=8, ep=1))] * 3
    for cores, expected in ((1, 1), (8, 1), (16, 2), (24, 3), (999, 3)):
        machine(cores)
        assert planned(eights, jobs="auto") == expected


def test_what_finds_no_memory_takes_turns(machine):
    machine(cores=8, memory=2 * (HOST_BYTES + 2 * RANK_BYTES))
    assert planned(jobs=4) == 2
    assert planned(jobs="auto") == 2
    machine(cores=8, memory=1)
    assert planned(jobs=4) == 1


def test_cases_that_may_run_on_gpus_take_turns_and_who_asks_for_more_is_warned(machine):
    machine(cores=64, gpus=["H100"])
    assert planned() == planned(jobs="auto") == 1
    assert planned(device="cpu", jobs=2) == 2
    for device in ("auto", "cuda"):
        with pytest.raises(UsageError) as refusal:
            plan_concurrency(CASES, RunOptions(device=device, jobs=2))
        assert str(refusal.value) == (
            "UsageError: -j has cases run side by side, and GPUs take one case at a time\n"
            "  expected: -j 1, or --device cpu\n"
            "  found: -j 2"
        )


def test_under_torchrun_cases_take_turns_and_who_asks_for_more_is_warned(machine, monkeypatch):
    machine(cores=64)
    for name, value in (("TORCHELASTIC_RUN_ID", "x"), ("RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert planned() == planned(jobs="auto") == 1
    with pytest.raises(UsageError, match="the ranks that torchrun made take one case at a time"):
        plan_concurrency(CASES, RunOptions(jobs=2))


def test_a_plan_says_what_goes_at_once_and_what_that_takes():
    plan = Concurrency(num_cases=2, num_ranks=8, cores=2, memory=8 << 30)
    assert str(plan) == "side by side: 2 cases at once; 16 ranks at most on 2 cores, some 2.3 GiB of 8.0 free"
    plan = Concurrency(num_cases=4, num_ranks=1, cores=4)
    assert str(plan) == "side by side: 4 cases at once; 4 ranks at most on 4 cores, some 2.0 GiB"


def recorded(folder):
    """Every recording's digests, as their file's bytes, and every log's name."""
    files = sorted(folder.rglob("digests.parquet"))
    logs = sorted(str(path.relative_to(folder)) for path in (folder / "logs").rglob("rank*.log"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}, logs


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """The cases' results, in turns and side by side: by jobs, their folder, results by name, and events."""
    found = {}
    for jobs in (1, 2):
        folder, events = tmp_path_factory.mktemp(f"jobs{jobs}"), []
        options = RunOptions(device="cpu", timeout=60.0, control="when_different", jobs=jobs)
        caller = threading.get_ident()

        def on_event(event, events=events, caller=caller):
            assert threading.get_ident() == caller
            events.append(event)

        with one_host() if jobs == 1 else nothing_left_behind(tmp_path_factory.mktemp("temporary")):
            results = list(run_cases(CASES, options, folder, on_event))
        found[jobs] = folder, {result.case.name: result for result in results}, events
    return found


@pytest.mark.ranks
def test_a_failing_case_beside_good_ones_is_reported_as_in_turns(both):
    (turns_folder, turns, _), (folder, beside, _) = both.values()
    assert {name: result.verdict for name, result in beside.items()} == {
        "bad": Verdict.DIFFERENT,
        "broken": Verdict.ERROR,
        "good": Verdict.EQUAL,
    }
    for name, result in beside.items():
        for fact in ("verdict", "compared", "mismatched", "differing", "control", "losses", "logs", "first_divergence"):
            assert getattr(result, fact) == getattr(turns[name], fact), (name, fact)
        assert (result.error or "").splitlines()[:1] == (turns[name].error or "").splitlines()[:1]
    assert recorded(folder) == recorded(turns_folder)


@pytest.mark.ranks
def test_each_cases_events_and_logs_are_its_own(both):
    (_, _, turns), (folder, _, beside) = both.values()
    for case in CASES:
        lines = [
            [(e.event, e.arm, e.system, e.step) for e in events if e.case == case.name] for events in (turns, beside)
        ]
        assert lines[0] == lines[1]
    text = {path: path.read_text() for path in (folder / "logs").rglob("rank1*.log")}
    assert {path.parts[-3] for path in text if "the toy is broken" in text[path]} == {"broken"}


@pytest.mark.slow
@pytest.mark.ranks
def test_a_host_that_dies_makes_errors_of_cases_that_begin_later_and_of_none_beside_it(tmp_path):
    cases = [toy("slow", name="beside"), toy("host_killer", name="during"), toy(name="after")]
    results = run_cases(cases, RunOptions(device="cpu", control="never", jobs=2), tmp_path)
    found = {result.case.name: result for result in results}
    assert {name: result.verdict for name, result in found.items()} == {
        "beside": Verdict.EQUAL,
        "during": Verdict.ERROR,
        "after": Verdict.ERROR,
    }
    assert found["after"].error == found["during"].error
    assert "the process that starts the ranks was killed by signal 9 (SIGKILL)" in found["during"].error


@pytest.mark.slow
@pytest.mark.ranks
def test_closing_the_results_early_ends_every_lane(tmp_path):
    options = RunOptions(device="cpu", timeout=60.0, control="never", jobs=2)
    slow = [toy("hanging", name="slow"), toy(name="one")]
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    with nothing_left_behind(temporary):
        results = run_cases(slow, options, tmp_path / "closed")
        assert next(results).case.name == "one"
        results.close()


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_every_lane_and_the_report_has_what_was_judged(tmp_path, number):
    code = (
        "import sys; from bitproof.harness.case.case import Case\n"
        "from bitproof.harness.commands.run import run_and_report\n"
        "from bitproof.harness.options import RunOptions\nfrom pathlib import Path\n"
        "from tests.harness.execute.test_launch import toy\n"
        "cases = [toy('hanging', name='slow'), toy(name='one')]\n"
        "options = RunOptions(device='cpu', control='never', jobs=2)\n"
        "sys.exit(run_and_report(cases, options, Path(sys.argv[1])))\n"
    )
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    with nothing_left_behind(temporary):
        command = [sys.executable, "-c", code, str(tmp_path / "reports")]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=dict(os.environ)) as process:
            watchdog = threading.Timer(60, process.kill)
            watchdog.start()
            for line in process.stdout:
                if "one: EQUAL" in line:
                    process.send_signal(number)
                    break
            rest = process.stdout.read()
            status = process.wait()
            watchdog.cancel()
    assert status == 3
    assert "slow" in rest and "UNVERIFIED" in rest
    [report] = (tmp_path / "reports").glob("2*/report.json")
    text = Path(report).read_text()
    assert '"EQUAL"' in text and "interrupted before this case was finished" in text
