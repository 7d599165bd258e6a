"""Ranks that torchrun made: the same verdicts, and a rank that raises or is killed is still told by rank 0."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.case import Case, Parallelism
from harness.errors import CaseError
from harness.execute.launch import run_cases
from harness.execute.torchrun import Team
from harness.machine.devices import Placement
from harness.options import RunOptions

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[3]
SCRIPT = """
import dataclasses, json, os, sys
from dataclasses import replace
from pathlib import Path
from harness.execute.launch import run_cases
from harness.options import RunOptions
from harness.disturb.stress import Stress
from tests.harness.execute.test_launch import toy
near = replace(toy("one_bit_off", name="near"), expected="CLOSE", close_within=0.01)
cases = [toy(name="equal"), toy("one_bit_off", name="differs"), toy("raising", name="raises"), near]
cases += [toy("reads_fresh_memory", name="fresh", reference="reads_fresh_memory"), toy(name="again")]
cases += [toy("killed", name="killed")]
out = Path(sys.argv[1])
options = RunOptions(
    device="cpu", control="up_to_difference", timeout=60.0, stress=Stress(), baseline_dir=out / "baselines"
)
lines = [
    (r.case.name, r.verdict, r.error, str(r.first_divergence), r.as_expected,
     {role: dataclasses.asdict(found) for role, found in r.baseline.items()})
    for r in run_cases(cases, options, out)
]
(out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(lines))
"""


def told_by_ranks(folder, script, timeout):
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


def test_every_rank_gets_every_verdict_and_an_error_does_not_reach_the_next_case(tmp_path):
    damaged = tmp_path / "baselines" / "again" / "tests.harness.toy_systems-steady" / "damaged"
    damaged.mkdir(parents=True)
    (damaged / "manifest.json").write_text("{")
    leader, follower = told_by_ranks(tmp_path, SCRIPT, 200)
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
        "  came from: logs/killed/tests.harness.toy_systems-killed/rank1.log\n"
        "\n"
        "a last word"
    )
    assert not list(tmp_path.glob("bitproof-*"))


LONELY = """
import json, os, sys
from pathlib import Path
from harness.execute.launch import run_cases
from harness.options import RunOptions
from tests.harness.execute.test_launch import toy
out = Path(sys.argv[1])
options = RunOptions(device="cpu", control="never", timeout=600.0)
results = run_cases([toy("deaf", name="deaf"), toy(name="again")], options, out)
(out / f"rank{os.environ['RANK']}.json").write_text(json.dumps([(r.case.name, r.verdict, r.error) for r in results]))
"""


@pytest.mark.slow
def test_a_rank_that_never_hears_of_a_peers_failure_is_ended_within_seconds_and_the_next_case_runs(tmp_path):
    """As on NCCL, where no error reaches the host. The case's time is 600 s, the test's is less."""
    leader, follower = told_by_ranks(tmp_path, LONELY, 120)
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


def test_ranks_of_torchrun_do_not_share_memory(tmp_path):
    """They may be on several machines. Without a word of it they meet over gloo."""
    team = object.__new__(Team)
    team._num_gpus, case = 0, Case(name="toy", family="toy", reference="eager", candidate="graph")
    team.options = RunOptions(device="cpu")
    assert team.place(case) == Placement("cpu", "gloo")
    team.options = RunOptions(device="cpu", collectives="shared")
    with pytest.raises(CaseError) as error:
        team.place(case)
    assert str(error.value) == (
        "CaseError: the ranks that torchrun made do not share memory, and may be on several machines\n"
        "  expected: collectives over gloo or NCCL\n"
        "  found: --collectives shared\n"
        "  fix: leave --collectives out, or run without torchrun"
    )
