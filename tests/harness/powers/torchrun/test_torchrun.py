"""Ranks that torchrun made: the same verdicts, and a rank that raises or is killed is still told by rank 0."""

import atexit
import contextlib
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from bitproof.builtin_cases.layouts.resume import resume_fsdp
from bitproof.harness.case import Case, Parallelism
from bitproof.harness.case.case_file import case_text
from bitproof.harness.errors import BitproofError, CaseError, RankError
from bitproof.harness.execute.failures import Problem
from bitproof.harness.execute.host.ranks import reserved_port
from bitproof.harness.execute.launch import run_cases
from bitproof.harness.execute.requests import FingerprintRequest, RankFingerprint
from bitproof.harness.machine.devices import Placement
from bitproof.harness.options import RunOptions
from bitproof.harness.powers.torchrun import coordinator as coordinator_module
from bitproof.harness.powers.torchrun import rendezvous as rendezvous_module
from bitproof.harness.powers.torchrun import store as store_module
from bitproof.harness.powers.torchrun.connections import Connections
from bitproof.harness.powers.torchrun.coordinator import Coordinator
from bitproof.harness.powers.torchrun.messages import Failed, RunReport, unpack
from bitproof.harness.powers.torchrun.seats import Whereabouts, assign_seats
from bitproof.harness.processes import framing
from bitproof.harness.runtime import interrupts
from tests.harness.execute.test_launch import toy, toy_folder
from tests.harness.execute.test_requests import request as a_run
from tests.sweeps import sweep

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[4]
SCRIPT = """
import dataclasses, json, os, sys
from dataclasses import replace
from pathlib import Path
from bitproof.harness.execute.launch import run_cases
from bitproof.harness.options import RunOptions
from bitproof.harness.disturb.stress import Stress
from bitproof.harness.powers.baselines.check import BaselineCheck, BaselineOptions
from tests.harness.execute.test_launch import toy, toy_folder
near = replace(toy("one_bit_off", name="near"), expected="CLOSE", close_within=0.01)
cases = [toy(name="equal"), toy("one_bit_off", name="differs"), toy("raising", name="raises"), near]
cases += [toy("reads_fresh_memory", name="fresh", reference="reads_fresh_memory"), toy(name="again")]
cases += [toy("killed", name="killed")]
out = Path(sys.argv[1])
check = BaselineCheck(BaselineOptions(out / "baselines"))
options = RunOptions(device="cpu", control="up_to_difference", timeout=60.0, stress=Stress(), active=(check,))
lines = [
    (r.case.name, r.verdict, r.error, str(r.first_divergence), r.as_expected,
     r.checks["baseline"].data)
    for r in run_cases(cases, options, out)
]
(out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(lines))
"""


def reported_by_ranks(folder, script, timeout):
    """What a script wrote into the folder that it is given, on each of two ranks that torchrun made."""
    (folder / "script.py").write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder), "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*command, str(folder / "script.py"), str(folder)],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
def test_every_rank_gets_every_verdict_and_an_error_does_not_reach_the_next_case(tmp_path):
    damaged = tmp_path / "baselines" / "again" / toy_folder("steady") / "damaged"
    damaged.mkdir(parents=True)
    (damaged / "manifest.json").write_text("{")
    leader, follower = reported_by_ranks(tmp_path, SCRIPT, 200)
    expected = [
        ("equal", "EQUAL"),
        ("differs", "DIFFERENT"),
        ("raises", "ERROR"),
        ("near", "CLOSE"),
        ("fresh", "NONDETERMINISTIC"),
        ("again", "EQUAL"),
        ("killed", "ERROR"),
    ]
    assert [tuple(line[:2]) for line in leader] == expected
    assert [line[:3] for line in follower] == [line[:3] for line in leader]
    assert [line[4:] for line in follower] == [line[4:] for line in leader], "exit statuses are made of these"
    assert [leader[number][4] for number in (0, 5)] == [True, False]
    assert [leader[number][5]["candidate"]["status"] for number in (0, 5)] == ["NO BASELINE", "UNVERIFIED"]
    assert "step=2, rank=1, kind='grad', name='weight'" in leader[1][3]
    assert "elements_differing=1, elements=6, max_ulp=1" in leader[1][3]
    assert "operator='bitwise_xor_.Scalar'" in leader[1][3], "what second runs logged came from torchrun's ranks too"
    assert leader[2][2].startswith(
        "RankError: rank 1 of tests.harness.toy_systems:raising raised at step 2\n"
        "  found: ValueError: the toy is broken\n"
    )
    assert "between='reference against itself under stress'" in leader[4][3]
    assert "operator='add.Tensor'" in leader[4][3], "replays go through torchrun's ranks too"
    assert leader[6][2] == (
        "RankError: rank 1 of tests.harness.toy_systems:killed was killed by signal 9 (SIGKILL) at step 2\n"
        f"  came from: logs/killed/{toy_folder('killed')}/rank1.log\n"
        "\n"
        "a last word"
    )
    assert not list(tmp_path.glob("bitproof-*"))


HALVES = """
import json, os, sys
from dataclasses import replace
from pathlib import Path
from bitproof.builtin_cases.layouts import resume
from bitproof.harness.execute.launch import run_cases
from bitproof.harness.options import RunOptions
names, out = ("generator_not_restored", "killed_as_it_saves"), Path(sys.argv[1])
wrong = [replace(resume.resume_fsdp, name=x, candidate=f"tests.harness.execute.laid_out:{x}") for x in names]
options = RunOptions(device="cpu", control="never", explain_timeout=1.0)
results = [*run_cases([resume.resume_fsdp, resume.fsdp_then_ddp, *wrong], options, out)]
lines = [(r.case.name, r.verdict, r.error, r.compared["param"], r.first_divergence and r.first_divergence.step)
         for r in results]
(out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(lines))
"""


@pytest.mark.slow
def test_ranks_of_torchrun_end_half_way_and_new_ones_go_on_from_what_they_saved(tmp_path):
    leader, follower = reported_by_ranks(tmp_path, HALVES, 200)
    assert leader == follower
    assert leader[:2] == [["resume_fsdp", "EQUAL", None, 96, None], ["fsdp_then_ddp", "EQUAL", None, 96, None]]
    assert [line[:2] + line[3:] for line in leader[2:]] == [
        ["generator_not_restored", "DIFFERENT", 96, 2],
        ["killed_as_it_saves", "ERROR", 0, None],
    ]
    assert "killed_as_it_saves was killed by signal 9" in leader[3][2]
    assert not list(tmp_path.glob("bitproof-*")), "what was saved is removed"


LONELY = """
import json, os, sys
from pathlib import Path
from bitproof.harness.execute.launch import run_cases
from bitproof.harness.options import RunOptions
from tests.harness.execute.test_launch import toy, toy_folder
out = Path(sys.argv[1])
options = RunOptions(device="cpu", control="never", timeout=600.0)
results = run_cases([toy("deaf", name="deaf"), toy(name="again")], options, out)
(out / f"rank{os.environ['RANK']}.json").write_text(json.dumps([(r.case.name, r.verdict, r.error) for r in results]))
"""


@pytest.mark.slow
def test_a_rank_that_never_hears_of_a_peers_failure_is_ended_within_seconds_and_the_next_case_runs(tmp_path):
    """As on NCCL, where no error reaches the host. The case's time is 600 s, the test's is less."""
    leader, follower = reported_by_ranks(tmp_path, LONELY, 120)
    assert leader == follower
    assert [line[:2] for line in leader] == [["deaf", "ERROR"], ["again", "EQUAL"]]
    assert leader[0][2].startswith(
        "RankError: rank 1 of tests.harness.toy_systems:deaf raised at step 2\n  found: ValueError: nobody hears\n"
    )


def test_another_world_size_than_torchruns_is_refused(tmp_path, monkeypatch):
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "16"}.items():
        monkeypatch.setenv(name, value)
    case = Case(name="toy", family="toy", reference="eager", candidate="graph", parallelism=Parallelism(world_size=8))
    with pytest.raises(CaseError) as error:
        run_cases([case], RunOptions(), tmp_path)
    assert str(error.value) == (
        "CaseError: case toy does not fit the ranks that torchrun started\n"
        "  expected: 8 ranks\n"
        "  found: WORLD_SIZE=16\n"
        "  fix: start 8 ranks, or give --world-size 16"
    )


def seated(*ranks, **options):
    """Rank 0, once all ranks have come."""
    coordinator = object.__new__(Coordinator)
    coordinator._seats, coordinator._reported_problem, coordinator.options = (
        assign_seats(ranks),
        None,
        RunOptions(**options),
    )
    return coordinator


def test_a_run_that_goes_on_is_refused_where_machines_do_not_see_each_others_folders():
    a, b = (Whereabouts(machine=name, node="") for name in "ab")
    with pytest.raises(CaseError, match="load what it saved, which other machines may not see") as error:
        seated(a, b, device="cpu").place(resume_fsdp)
    assert "found: 2 ranks on 2 machines" in str(error.value)
    assert seated(a, a, device="cpu").place(resume_fsdp) == Placement("cpu", "gloo")


def test_ranks_of_torchrun_do_not_share_memory():
    """They may be on several machines. Without a word of it they meet over gloo."""
    case, rank = Case(name="toy", family="toy", reference="eager", candidate="graph"), Whereabouts(machine="a", node="")
    assert seated(rank, rank, device="cpu").place(case) == Placement("cpu", "gloo")
    with pytest.raises(CaseError) as error:
        coordinator = seated(rank, rank, device="cpu", collectives="shared")
        coordinator.place(case)
    assert str(error.value) == (
        "CaseError: the ranks that torchrun made do not share memory, and may be on several machines\n"
        "  expected: collectives over gloo or NCCL\n"
        "  found: --collectives shared\n"
        "  fix: leave --collectives out, or run without torchrun"
    )


class AnsweringHost:
    """A host that says what it is made of and which GPUs it sees, and takes part in no run."""

    def __init__(self, facts, gpus=()):
        self.facts, self.gpus = facts, gpus

    def ask(self, request, timeout, on_event, is_abandoned=lambda: False):
        assert isinstance(request, FingerprintRequest)
        return RankFingerprint(facts=self.facts, gpus=self.gpus if request.names_gpus else ())

    def kill(self):
        pass


@pytest.fixture
def teams(tmp_path, monkeypatch):
    """Ranks in threads of this process, whose hosts say what a test has them say."""
    import torch.distributed  # noqa: F401 (it takes longer than some of these wait)

    reported = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for name, value in reported.items():
        monkeypatch.setenv(name, value)
    made = []
    monkeypatch.setattr(Coordinator, "_start_host", lambda coordinator: AnsweringHost(FACTS))

    def make(rank, timeout=30.0, **facts):
        (tmp_path / f"work{rank}").mkdir(exist_ok=True)
        coordinator = Coordinator(
            tmp_path / f"run{rank}", RunOptions(device="cpu", timeout=timeout), tmp_path / f"work{rank}", rank
        )
        coordinator._host = AnsweringHost(FACTS | facts)
        made.append(coordinator)
        return coordinator

    yield make
    for coordinator in made:
        coordinator.close()


FACTS = {"commit": "a", "environment MKL_CBWR": "x"}


def joined(*teams):
    """What each came to when all joined at once: None, or its error."""

    def join(coordinator):
        try:
            coordinator.join()
        except BitproofError as error:
            return error
        return None

    with ThreadPoolExecutor(len(teams)) as pool:
        return list(pool.map(join, teams))


def test_ranks_of_one_kind_come_together_and_each_machine_has_a_folder_for_its_logs(teams, tmp_path, monkeypatch):
    monkeypatch.setattr(coordinator_module, "_node", iter(["a", "b", "b"]).__next__)
    made = [teams(rank) for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(made[0].join)]
        time.sleep(0.2)
        running.append(pool.submit(made[1].join))
        time.sleep(0.2)
        running.append(pool.submit(made[2].join))
    assert [run.result() for run in running] == [None] * 3
    assert [coordinator._own_dir.name for coordinator in made] == ["run0", "run1", "run1"]
    request = replace(a_run(tmp_path), logs=made[0]._own_dir / "logs" / "case" / "eager", profile=Path("p"))
    assert made[0]._localized(request) == request
    localized = made[2]._localized(request)
    assert (localized.logs, localized.profile) == (made[1]._own_dir / "logs" / "case" / "eager", None)


def test_ranks_learn_of_each_other_which_gpu_each_has_without_a_word_of_their_launcher(teams, monkeypatch):
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(coordinator_module, "_node", lambda: "localhost/")  # both machines are called so
    monkeypatch.setattr(coordinator_module, "own_machine", lambda: f"localhost {machines.pop(0)}")
    made, machines = [teams(rank) for rank in range(3)], ["a", "b", "b"]
    for rank, coordinator in enumerate(made):
        coordinator.options = RunOptions(timeout=30.0)
        coordinator._host = AnsweringHost(FACTS, (f"GPU-{rank}",))
    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(made[0].join)]
        time.sleep(0.2)
        running.append(pool.submit(made[1].join))
        time.sleep(0.2)
        running.append(pool.submit(made[2].join))
    assert [run.result() for run in running] == [None] * 3
    seats = [coordinator.seat for coordinator in made]
    assert [(own.local_rank, own.local_world_size, own.gpu, own.name) for own in seats] == [
        (0, 1, 0, "GPU-0"),
        (0, 2, 0, "GPU-1"),
        (1, 2, 0, "GPU-2"),
    ]
    assert [coordinator._own_dir.name for coordinator in made] == ["run0", "run1", "run1"]
    assert made[0].place(replace(toy(), name="any")) == Placement("cuda", "nccl", 1)


def test_auto_says_why_it_takes_no_gpu_although_ranks_see_some(capsys):
    sees = Whereabouts(machine="a", node="", gpus=("GPU-0",))
    coordinator = seated(sees, sees)
    assert coordinator.place(toy()) == coordinator.place(toy()) == Placement("cpu", "gloo")
    said = "bitproof: no GPU is used: ranks 0, 1 would use one GPU, and NCCL gives each rank one of its own\n"
    assert capsys.readouterr().err == said


def test_every_rank_hears_which_ranks_differ_and_in_what(teams):
    first, second, third = joined(teams(0), teams(1), teams(2, commit="b", **{"environment LD_PRELOAD": "y"}))
    assert str(first) == str(second) == str(third)
    assert str(first).startswith("CaseError: rank 2 is not made of what the others are\n")
    assert "commit: a on ranks 0, 1; b on rank 2\n" in str(first)
    assert "environment LD_PRELOAD: nothing on ranks 0, 1; y on rank 2\n" in str(first)


def test_those_who_do_not_come_are_named_by_all(teams):
    first, second = joined(teams(0, timeout=3.0), teams(1, timeout=30.0))
    assert str(first).startswith("RankError: rank 2 of 3 did not come within 3 s\n")
    assert "found: ranks 0, 1\n" in str(first)
    assert str(second) == str(first)


def test_rank_0_says_for_whom_it_waits_and_who_came_from_where(teams, monkeypatch, capsys):
    monkeypatch.setattr(rendezvous_module, "WORD_SECONDS", 0.5)
    monkeypatch.setattr(coordinator_module, "_node", iter(["a/0", "b/1"]).__next__)
    joined(teams(0, timeout=4.0), teams(1, timeout=30.0))
    words = [line for line in capsys.readouterr().err.splitlines() if line.startswith("bitproof: waiting")]
    assert words[-1] == "bitproof: waiting for rank 2 of 3: rank 0 came from a/0; rank 1 came from b/1"
    assert len(words) == len(set(words)), "once each"


def test_rank_0_says_so_again_soon_after_others_have_come(teams, monkeypatch, capsys):
    monkeypatch.setattr(rendezvous_module, "WORD_SECONDS", 0.5)
    monkeypatch.setattr(coordinator_module, "_node", iter(["a/0", "b/1", "c/2"]).__next__)
    made = [teams(rank) for rank in range(3)]
    said = []

    def wait_until_said(word):
        until = time.monotonic() + 20
        while not any(line.startswith(word) for line in said):
            assert time.monotonic() < until, said
            said.extend(capsys.readouterr().err.splitlines())
            time.sleep(0.05)

    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(made[0].join)]
        wait_until_said("bitproof: waiting for ranks 1, 2 of 3: rank 0 came from a/0")
        monkeypatch.setattr(rendezvous_module, "WORD_SECONDS", math.inf)
        running.append(pool.submit(made[1].join))
        wait_until_said("bitproof: waiting for rank 2 of 3: rank 0 came from a/0; rank 1 came from b/1")
        running.append(pool.submit(made[2].join))
    assert [run.result() for run in running] == [None] * 3


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_torchrun_ends_names_its_dead_siblings_to_all(rank, teams, monkeypatch):
    """As after SIGTERM: rank 2 has died, and torchrun ends who is left."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(3 - rank))
    monkeypatch.setenv("RANK", str(rank))
    living = [[("RANK", str(each))] for each in range(rank, 2)]
    monkeypatch.setattr(store_module, "children_environments", lambda parent: [*living, [], [("A", "b")]])
    made = [teams(0), teams(1)]
    is_ended = threading.Event()
    listen = made[rank].peers.links.wait

    def wait(seconds):
        listen(seconds)
        if is_ended.is_set():
            is_ended.clear()
            raise interrupts.Interrupt

    monkeypatch.setattr(made[rank].peers.links, "wait", wait)
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(joined, coordinator) for coordinator in made]
        time.sleep(1.0)
        is_ended.set()
        [error] = running[rank].result()
        if rank:
            made[1].close(Problem.of(error, "rank 1"))
        assert str(error).startswith("RankError: rank 2 ended on ")
        assert error.rank == 2
        assert f"torchrun's ranks {'0 to 2' if rank == 0 else '1, 2'} there to live" in str(error)
        [reported] = running[1 - rank].result()
        assert str(reported) == str(error)


def test_nobody_is_named_where_all_siblings_live_or_nothing_is_known_of_them(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    for name, value in {"RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    launcher = store_module.Launcher()
    for processes in ([], [[("RANK", "3")], [("RANK", "2")], [("A", "b")]]):
        monkeypatch.setattr(store_module, "children_environments", lambda parent, found=processes: found)
        assert launcher.error_of_dead_siblings() is None
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert store_module.Launcher().error_of_dead_siblings() is None, "another launcher's"


def test_the_children_of_a_process_are_those_that_live():
    child = subprocess.Popen(["sleep", "60"], env={"RANK": "7"})
    # Until exec has ended, the child has its parent's environment, and then for a moment none.
    while Path(f"/proc/{child.pid}/environ").read_bytes() != b"RANK=7\0":
        assert child.poll() is None
    assert [("RANK", "7")] in store_module.children_environments(os.getpid())
    child.kill()
    while (status := Path(f"/proc/{child.pid}/stat").read_text().split()[2]) != "Z":
        assert status
    assert [("RANK", "7")] not in store_module.children_environments(os.getpid()), "nobody has reaped it yet"
    child.wait()


def test_one_who_came_and_vanished_before_the_others_came_is_named_at_once(teams):
    leader, other = teams(0, timeout=60.0), teams(1, timeout=10.0)
    began = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        running, there = pool.submit(joined, leader), pool.submit(joined, other)
        while 1 not in leader.peers.connections:
            assert time.monotonic() - began < 20
            time.sleep(0.05)
        other.peers.connections[0].socket.shutdown(socket.SHUT_RDWR)
        [error] = running.result()
        assert time.monotonic() - began < 30
        assert str(error).startswith("RankError: rank 1 vanished before all had come\n")
        leader.close()
        assert there.result() != [None]


@pytest.mark.parametrize(
    ("hello", "what"),
    [
        ({"world_size": 4}, "a rank came that cannot be one of this run"),
        ({"rank": 0}, "a rank came that cannot be one of this run"),
        ({"rank": 3}, "a rank came that cannot be one of this run"),
        ({"rank": -1}, "a rank came that cannot be one of this run"),
        ({"kind": "Greeting"}, "rank 1 speaks otherwise than rank 0"),
        ({"more": 1}, "rank 1 speaks otherwise than rank 0"),
        ({"rank": "one"}, "speaks otherwise than rank 0"),
        ({"token": "stale"}, None),
        ({"token": None}, None),
        ({"token": "\u00e9"}, None),
    ],
)
def test_who_does_not_belong_is_refused_and_another_runs_rank_is_only_sent_away(hello, what, teams):
    leader = teams(0, timeout=4.0)
    other = Connections(leader.work)
    try:
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(joined, leader)
            while not leader.peers.token or leader.peers.links._listener is None:
                time.sleep(0.02)
            line = other.connect("127.0.0.1", leader.peers.links._listener.getsockname()[1], "rank 0")
            said = {
                "kind": "Hello",
                "token": leader.peers.token,
                "rank": 1,
                "world_size": 3,
                "node": "n",
                "run_dir": "r",
            }
            with other._changed:
                line.put(json.dumps(said | hello).encode())
            other._wake()
            [error] = running.result()
    finally:
        other.close()
    if what is None:
        assert str(error).startswith("RankError: ranks 1, 2 of 3 did not come within 4 s\n")
        assert line.gone is not None
    else:
        assert isinstance(error, CaseError)
        assert what in str(error)


def test_who_comes_after_all_have_come_is_sent_away_by_name_and_nobody_else_minds(teams, capsys):
    made = [teams(rank) for rank in range(3)]
    assert joined(*made) == [None] * 3
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(joined, teams(2))
        until = time.monotonic() + 20
        while not late.done():
            made[0].peers.listen()
            assert time.monotonic() < until
            time.sleep(0.05)
    [error] = late.result()
    assert isinstance(error, CaseError)
    assert "found: rank 2 of 3, on " in str(error) and "; rank 2 came from " in str(error)
    assert str(error) in capsys.readouterr().err, "rank 0 says it, too"
    assert made[0].peers.gone() == {}


def test_a_second_rank_0_is_refused_while_the_first_lives_and_takes_the_place_of_one_that_is_gone(
    teams, monkeypatch, capsys
):
    monkeypatch.setattr(rendezvous_module, "WORD_SECONDS", 0.2)
    first, second = teams(0, timeout=20.0), teams(0, timeout=5.0)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(joined, first)
        while "waiting for ranks 1, 2 of 3" not in capsys.readouterr().err:
            time.sleep(0.05)
        [error] = joined(second)
        assert str(error).startswith("CaseError: this run has a rank 0 already\n")
        first.peers.links.close()
        third = teams(0, timeout=3.0)
        [error] = joined(third)
        assert str(error).startswith("RankError: ranks 1, 2 of 3 did not come within 3 s\n")
        running.result()


def test_a_signal_that_follows_the_loss_of_rank_0_is_reported_as_that_loss(teams, monkeypatch):
    """torchrun ends what it started when its store is lost with rank 0's machine, and says nothing of that to it."""
    made = [teams(rank) for rank in range(3)]
    assert joined(*made) == [None] * 3
    stopped = interrupts.Interrupt()
    assert made[1].peers.explained(stopped) is stopped
    made[0].peers.links.close(0.0)
    limit = time.monotonic() + 60
    while not made[1].peers.gone():
        assert time.monotonic() < limit
        time.sleep(0.05)
    assert str(made[1].peers.explained(stopped)).startswith("RankError: rank 0 vanished before all was done\n")
    store = RankError("the store at which ranks meet has ended, at here:1")  # by rank 0's agent, which ends with it
    monkeypatch.setattr(made[1].peers.launcher, "ended", lambda: store)
    text = str(made[1].peers.explained(stopped))
    assert text.startswith("RankError: rank 0 vanished before all was done\n") and "; the store at which" in text
    other = ValueError()
    assert made[1].peers.explained(other) is other, "which says itself what it is"
    assert made[0].peers.explained(stopped) is stopped, "it has a report, which says so"


def test_what_reports_an_earlier_run_does_not_count(teams):
    leader = teams(0)
    leader.peers.run_number = 5
    for run, counts in ((4, False), (6, False), (5, True)):
        leader.peers.take(1, framing.write(RunReport(run=run, clock=0.0)), None)
        assert (1 in leader.peers.accounts) == counts
    leader.peers.take(2, framing.write(Failed(run=4)), None)
    assert leader.peers.failed_at == float("inf")
    leader.peers.take(2, framing.write(Failed(run=5)), None)
    assert leader.peers.failed_at < float("inf")


def test_files_that_did_not_come_whole_are_refused(tmp_path):
    content, part = tmp_path / "content", tmp_path / "part"
    content.write_bytes(b"abcdef")
    unpack(RunReport(run=1, clock=0.0, num_bytes=(1, 2, 3)), content, part)
    assert [part.with_suffix(suffix).read_bytes() for suffix in ("", ".safetensors", ".zip")] == [b"a", b"bc", b"def"]
    for sizes in ((1, 2, 4), (6,), (1, 2, 3, 0), ()):
        content.write_bytes(b"abcdef")
        with pytest.raises(RankError, match="did not arrive whole"):
            unpack(RunReport(run=1, clock=0.0, num_bytes=sizes), content, part)


DYING = """
import os, signal, sys, time
if os.environ.get("RANK") == os.environ["DIES"] and "bitproof" in sys.orig_argv:
    time.sleep(float(os.environ["AFTER"]))
    open(os.environ["DIED"], "w").write(str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["static", "c10d"])
@pytest.mark.parametrize(("dies", "after"), [(1, 10), (3, 10), (3, 0)])
def test_a_rank_that_dies_before_it_reaches_rank_0_is_named_within_ten_seconds(kind, dies, after, tmp_path):
    """By what torchrun started beside it; where that was still loading and so ended, too, as one that does not come."""
    (tmp_path / "sitecustomize.py").write_text(DYING)
    died, port = tmp_path / "died", free_port()
    reported = {"DIES": str(dies), "AFTER": str(after), "DIED": str(died), "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    reported |= {"GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(tmp_path)}
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "x"]
    nodes = []
    for node in (0, 1):
        where = ["--master-port", port, "--node-rank", str(node)] if kind == "static" else meeting
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2", *where]
        words = [*command("--world-size", "4", "--timeout", "25")[1:], "--report-dir", str(tmp_path / f"reports{node}")]
        with (tmp_path / f"output{node}").open("w") as out:
            nodes.append(
                subprocess.Popen([*torchrun, *words], env=os.environ | reported, cwd=ROOT, stdout=out, stderr=out)
            )
        time.sleep(node == 0)
    try:
        # torchrun's agents choose their order in c10d, so either may have rank 0
        word = f"rank {dies} ended on" if after else "waiting for ranks 2, 3 of 4: ranks 0, 1 came from"
        there = float("inf")  # when a rank was loaded and began to wait for others, which a busy machine delays
        while word not in "".join((tmp_path / f"output{node}").read_text() for node in (0, 1)):
            assert any(node.poll() is None for node in nodes), "all have ended, and nobody named it"
            if any(tmp_path.glob("bitproof-*")):
                there = min(there, time.time())
            time.sleep(0.1)
        assert time.time() - max(float(died.read_text()), there) < 10
        assert all(node.wait(timeout=60) == 1 for node in nodes), "torchrun's status"
    finally:
        for node in nodes:
            node.terminate()
            node.wait()
    assert not list(tmp_path.glob("bitproof-*"))


def command(*arguments, what=("-k", "unchunked")):
    return [sys.executable, "-m", "bitproof", "run", *what, *arguments, "--device", "cpu", "--no-control"]


RESERVED = contextlib.ExitStack()
atexit.register(RESERVED.close)


def free_port():
    """A port that no test beside this one is given while this process lives."""
    return str(RESERVED.enter_context(reserved_port()).getsockname()[1])


def is_served(port):
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", int(port))) == 0


def started_as(rank, folder, *arguments, port=None, root=ROOT, what=("-k", "unchunked"), **environment):
    """A command as one rank of two, by what every launcher of ranks sets; nobody starts the other one here."""
    reported = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port or free_port()}
    return subprocess.Popen(
        [
            *command("--world-size", "2", "--steps", "1", *arguments, what=what),
            *("--report-dir", str(folder / f"reports{rank}")),
        ],
        env=os.environ
        | reported
        | {"GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(folder), "PYTHONPATH": str(root)}
        | environment,
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize("rank", sweep([0, 1], 1))
def test_a_rank_that_never_comes_is_named_when_time_is_up(rank, tmp_path):
    port = free_port()
    with started_as(rank, tmp_path, "--timeout", "5", port=port) as alone:
        _, err = alone.communicate(timeout=100)
    assert alone.returncode == 3, err
    found = "rank 0" if rank == 0 else f"nothing listens at 127.0.0.1:{port}: Connection refused"
    assert (
        f"RankError: rank {1 - rank} of 2 did not come within 5 s\n"
        f"  expected: 2 ranks that meet at 127.0.0.1:{port}\n"
        f"  found: {found}"
    ) in err
    fix = "start every rank, with one WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or give a longer --timeout"
    assert f"\n  fix: {fix}\n" in err
    assert not list(tmp_path.glob("bitproof-*"))


@pytest.mark.parametrize(("rank", "number"), sweep([(0, signal.SIGTERM), (1, signal.SIGINT)], (0, signal.SIGTERM)))
def test_signals_hold_while_ranks_wait_for_each_other(rank, number, tmp_path):
    with started_as(rank, tmp_path, "--timeout", "3000") as alone:
        limit = time.monotonic() + 200
        while not list(tmp_path.glob("bitproof-*")):  # its work folder: from here on it waits for the other one
            assert alone.poll() is None and time.monotonic() < limit
            time.sleep(0.1)
        alone.send_signal(number)
        _, err = alone.communicate(timeout=200)
    assert alone.returncode == 3, err
    assert not list(tmp_path.glob("bitproof-*"))


@pytest.mark.slow
def test_what_listens_and_does_not_answer_is_reported_and_hears_signals(tmp_path):
    """As another service does, or torch's store in a process that was stopped."""
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        port = str(deaf.getsockname()[1])
        with started_as(1, tmp_path, "--timeout", "5", port=port) as alone:
            _, err = alone.communicate(timeout=100)
    assert alone.returncode == 3
    assert "rank 0 of 2 did not come within 5 s" in err
    assert f"127.0.0.1:{port}" in err


@pytest.mark.slow
def test_a_machine_with_another_environment_and_an_edited_checkout_is_refused_before_anything_runs(tmp_path):
    """Twice the learning rate on one of two machines: it trained, EQUAL, where rank 0 alone said what it is made of.

    What Python runs as it starts on one machine, which may put anything in a function's place, counts as well.
    """
    port, start_up, other_root = free_port(), tmp_path / "start_up", tmp_path / "checkout"
    start_up.mkdir()
    (start_up / "sitecustomize.py").write_text("")
    for package in ("bitproof", "harness", "reference", "cases"):
        shutil.copytree(
            ROOT / package, other_root / package, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    optimizer = other_root / "reference" / "optimizer.py"
    optimizer.write_text(optimizer.read_text() + "\n# edited\n")
    environment = {"ATEN_CPU_CAPABILITY": "default", "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2"}
    environment |= {"NCCL_SOCKET_IFNAME": "x", "PYTHONPATH": f"{start_up}:{other_root}"}
    with (
        started_as(0, tmp_path, port=port) as leader,
        started_as(1, tmp_path, port=port, root=other_root, **environment) as other,
    ):
        _, err = leader.communicate(timeout=200)
        reported = other.communicate(timeout=60)
    assert (leader.returncode, other.returncode) == (2, 2)
    assert "CaseError: rank 1 is not made of what the others are\n" in err
    assert "environment ATEN_CPU_CAPABILITY: nothing on rank 0; default on rank 1\n" in err
    assert "environment GLIBC_TUNABLES: nothing on rank 0; glibc.cpu.hwcaps=-AVX2 on rank 1\n" in err
    assert "run as Python starts: sitecustomize: nothing on rank 0; sha256 e3b0c44298fc1c14 on rank 1\n" in err
    assert "sources" in err
    assert "NCCL_SOCKET_IFNAME" not in err
    assert "build of torch" not in err and "files of torch" not in err, "they are the same"
    assert reported == ("", ""), "rank 0 tells it"
    assert not list(tmp_path.glob("reports*/*/recordings"))


LAZY = """
from tests.harness.toy_systems import Toy

class Lazy(Toy):
    def misbehave(self, index):
        import what_the_step_imports
"""


@pytest.mark.slow
def test_what_only_a_step_imports_must_be_the_same_on_all_machines_too(tmp_path):
    """It is loaded when ranks have long agreed on all else: the case is an ERROR that names it, and no EQUAL."""
    port, case = free_port(), tmp_path / "lazy.json"
    case.write_text(
        case_text(replace(toy(name="lazy"), reference="lazy_trainer:Lazy", candidate="lazy_trainer:Lazy", steps=1))
    )
    for rank in (0, 1):
        folder = tmp_path / f"machine{rank}"
        folder.mkdir()
        (folder / "lazy_trainer.py").write_text(LAZY)
        (folder / "what_the_step_imports.py").write_text(f"rate = {rank}\n")
    starts = [
        started_as(
            rank, tmp_path, port=port, what=("--case", str(case)), PYTHONPATH=f"{tmp_path / f'machine{rank}'}:{ROOT}"
        )
        for rank in (0, 1)
    ]
    with starts[0] as leader, starts[1] as other:
        out, _ = leader.communicate(timeout=200)
        other.communicate(timeout=60)
    assert leader.returncode in (2, 3), out
    assert "rank 1 is not made of what the others are" in out
    assert "module what_the_step_imports: sha256" in out and "module lazy_trainer" not in out


HANGING = """
import os, sys, time
from pathlib import Path
from bitproof.harness.execute.launch import run_cases
from bitproof.harness.options import RunOptions
from tests.harness.execute.test_launch import toy, toy_folder
folder = Path(sys.argv[1])
[result] = run_cases([toy("hanging", name="hangs")], RunOptions(device="cpu", control="never", timeout=300.0), folder)
(folder / f"named{os.environ['RANK']}").write_text(f"{time.time()} {result.error}")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "dies"), [("c10d", "machine"), ("c10d", "rank 0"), ("static", "rank 0")])
def test_what_dies_in_a_step_is_named_by_the_other_machine_within_ten_seconds(kind, dies, tmp_path):
    """A machine with torchrun's store, or the process of rank 0 alone, whose agent and store live on."""
    case, port, nodes = tmp_path / "toy.json", free_port(), []
    case.write_text(case_text(toy("hanging")))
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "x"]
    reported = {"GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    words = ["bitproof", "run", "--case", str(case), "--device", "cpu", "--no-control", "--report-dir"]
    for node in (0, 1):
        where = ["--master-port", port, "--node-rank", str(node)] if kind == "static" else meeting
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", *where]
        with (tmp_path / f"output{node}").open("w") as out:
            line = [*torchrun, "-m", *words, str(tmp_path / f"reports{node}")]
            nodes.append(subprocess.Popen(line, env=os.environ | reported, cwd=ROOT, stdout=out, stderr=out))
        limit = time.monotonic() + 100
        while node == 0 and not is_served(port):  # this one is to serve the store
            assert time.monotonic() < limit
            time.sleep(0.1)
    machine = []
    try:
        limit = time.monotonic() + 200
        while len(list(tmp_path.glob("reports*/*/logs/*/*hanging*/rank*.log"))) < 2:
            assert time.monotonic() < limit and all(node.poll() is None for node in nodes)
            time.sleep(0.1)
        machine = [psutil.Process(nodes[0].pid), *psutil.Process(nodes[0].pid).children(recursive=True)]
        names, lost = 1, ("RankError: the store at which ranks meet has ended, at ", " vanished ")
        if dies == "rank 0":
            agents = [psutil.Process(node.pid) for node in nodes]  # which of them has rank 0, they choose in c10d
            leaders = [child for agent in agents for child in agent.children() if child.environ().get("RANK") == "0"]
            machine, names, lost = leaders, 1 - agents.index(leaders[0].parent()), ("RankError: rank 0 vanished ",)
        for process in machine:
            process.kill()
        began = time.monotonic()
        while not any(word in (tmp_path / f"output{names}").read_text() for word in lost):
            assert time.monotonic() - began < 10
            time.sleep(0.1)
    finally:
        for process in machine:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for node in nodes:
            node.terminate()
            node.wait()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_vanishes_in_a_collective_is_named_within_ten_seconds(number, tmp_path):
    """Killed with all that it started, as with its machine; stopped, as where nobody closes its connections."""
    reported = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "GLOO_SOCKET_IFNAME": "lo"}
    leader, other = (
        subprocess.Popen(
            [sys.executable, "-c", HANGING, str(tmp_path)],
            env=os.environ | reported | {"RANK": str(rank), "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
            cwd=ROOT,
            start_new_session=True,
        )
        for rank in (0, 1)
    )
    everybody = []
    try:
        limit = time.monotonic() + 150
        while len(list(tmp_path.glob("logs/hangs/*hanging*/rank*.log"))) < 2:
            assert time.monotonic() < limit
            time.sleep(0.1)
        time.sleep(3)  # its rank sleeps by now, and rank 0's waits for it
        everybody = [psutil.Process(other.pid), *psutil.Process(other.pid).children(recursive=True)]
        for process in everybody:
            process.send_signal(number)
        began = time.time()
        assert leader.wait(timeout=100) == 0
        when, _, error = (tmp_path / "named0").read_text().partition(" ")
        assert error.startswith("RankError: rank 1 vanished while tests.harness.toy_systems:hanging ran\n")
        assert float(when) - began < 10
    finally:
        for process in everybody:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        other.wait()
        leader.kill()
        leader.wait()
