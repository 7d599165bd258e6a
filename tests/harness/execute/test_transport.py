"""Whom requests go to, and what each command does on ranks that torchrun made."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from bitproof.builtin_cases.chunking import transformer_batch
from bitproof.harness.capture.recording_files import read_recording
from bitproof.harness.case import Batch, Case, Model, Parallelism
from bitproof.harness.case.case_file import case_text
from bitproof.harness.cli import main
from bitproof.harness.errors import CaseError, UsageError
from bitproof.harness.execute.session import Session
from bitproof.harness.execute.transport import open_client, refuse_torchrun
from bitproof.harness.options import RunOptions
from bitproof.harness.runtime import launched

pytestmark = pytest.mark.ranks

TOYS = "tests.harness.toy_systems:"
ROOT = Path(__file__).parents[3]
CASE = Case(name="toy", family="toy", reference="eager", candidate="graph", parallelism=Parallelism(world_size=2))
SMALL = ("--world-size", "2", "--steps", "2", "--device", "cpu")


def become_rank(monkeypatch: pytest.MonkeyPatch, rank: int, world_size: int = 2) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "RANK": rank, "WORLD_SIZE": world_size}.items():
        monkeypatch.setenv(name, str(value))


@dataclass
class Ended:
    """What torchrun and its two ranks left: a log of each rank, and torchrun's exit status."""

    status: int
    out: tuple[str, str]
    err: tuple[str, str]
    statuses: tuple[int | None, int | None]
    seconds: float


def torchrun(folder: Path, *arguments: str) -> Ended:
    """One bitproof command on two ranks, each with its output in a file of its own."""
    script = folder / "rank.sh"
    script.write_text(
        f'cd {ROOT}\n"{sys.executable}" -m bitproof "$@" >{folder}/out$RANK 2>{folder}/err$RANK\n'
        f"status=$?\necho $status >{folder}/status$RANK\nexit $status\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    began = time.monotonic()
    done = subprocess.run(
        [*command, "bash", str(script), *arguments],
        env=os.environ | {"TMPDIR": str(folder), "GLOO_SOCKET_IFNAME": "lo"},
        cwd=ROOT,
        capture_output=True,
        timeout=600,
        check=False,
    )
    files = {name: [folder / f"{name}{rank}" for rank in (0, 1)] for name in ("out", "err", "status")}
    out, err = (tuple(file.read_text() for file in files[name]) for name in ("out", "err"))
    statuses = tuple(int(file.read_text()) if file.exists() else None for file in files["status"])
    return Ended(done.returncode, out, err, statuses, time.monotonic() - began)  # type: ignore[arg-type]


@pytest.mark.slow
def test_all_ranks_record_into_the_one_recording_of_rank_0(tmp_path: Path) -> None:
    folder = tmp_path / "recording"
    line = ["record", "unchunked", "--system", f"{TOYS}steady", *SMALL, "--report-dir", str(tmp_path / "reports")]
    done = torchrun(tmp_path, *line, "--out", str(folder))
    assert done.status == 0, done.err
    recording = read_recording(folder)
    assert {key.rank for key in recording.records} == {0, 1}
    assert recording.manifest.world_size == 2
    assert f"recording: {folder}" in done.out[0]
    assert done.out[1] == done.err[1] == "", "who follows says nothing"
    again = tmp_path / "again"
    assert main([*line, "--out", str(again)]) == 0
    assert {key: record.digest for key, record in read_recording(again).records.items()} == {
        key: record.digest for key, record in recording.records.items()
    }, "the same bits as on ranks of its own"


@pytest.mark.slow
def test_a_pass_is_found_on_torchruns_ranks(tmp_path: Path) -> None:
    small = replace(
        transformer_batch,
        steps=1,
        parallelism=Parallelism(world_size=2, ep=1),
        batch=Batch(sequences=2, seq_len=1),
        model=Model(layers=1, dense_layers=1, dim=8, heads=1),
    )
    file = tmp_path / "small.json"
    file.write_text(case_text(small))
    extra = "cases/examples/extra_passes.py:add_gradients_in_bfloat16"
    line = ["bisect", str(file), "--device", "cpu", "--extra-pass", extra, "--report-dir", str(tmp_path / "reports")]
    done = torchrun(tmp_path, *line)
    found = json.loads((tmp_path / "reports" / "latest" / "bisect.json").read_text())
    assert found["pass"] == "add_gradients_in_bfloat16", done.out
    verdicts = [probe["verdict"] for probe in found["probes"]]
    assert verdicts == ["DIFFERENT", "EQUAL", "DIFFERENT"], "prefixes ran on torchrun's ranks too"
    assert done.status == 1
    assert done.out[1] == done.err[1] == ""


@pytest.mark.slow
def test_a_first_difference_is_localized_on_torchruns_ranks(tmp_path: Path) -> None:
    systems = ("--reference", f"{TOYS}steady", "--candidate", f"{TOYS}one_bit_off")
    done = torchrun(
        tmp_path, "localize", "unchunked", *systems, *SMALL, "--steps", "4", "--report-dir", str(tmp_path / "reports")
    )
    file = tmp_path / "reports" / "latest" / "localize.json"
    found = json.loads(file.read_text())["first_divergence"]
    assert [found[name] for name in ("step", "kind", "name", "rank")] == [2, "grad", "weight", 1], done.err
    assert found["elements_differing"] == 1, "replays ran on torchrun's ranks too"
    assert "to blame: " in done.out[0]
    assert done.status == 1
    assert done.out[1] == done.err[1] == ""


@pytest.mark.slow
def test_shrink_is_refused_on_one_rank_and_at_once(tmp_path: Path) -> None:
    done = torchrun(tmp_path, "shrink", "moe_seq", *SMALL, "--report-dir", str(tmp_path / "reports"))
    assert done.status == 1, "torchrun's own"
    assert done.err[0] == (
        "UsageError: shrink tries fewer and fewer ranks, so it starts its own\n"
        "  expected: bitproof shrink, by itself\n"
        "  found: bitproof shrink under torchrun\n"
    )
    assert done.err[1] in ("", "bitproof: interrupted\n"), "torchrun may end it while it starts"
    assert done.out == ("", "")
    assert done.statuses[0] == 2
    assert done.statuses[1] in (2, None), "torchrun may end the shell first"
    assert done.seconds < 60
    assert not (tmp_path / "reports").exists()


@pytest.mark.parametrize(
    "command", [["record", "unchunked", "--system", f"{TOYS}steady", "--out"], ["bisect", "moe_seq", "--report-dir"]]
)
def test_another_world_size_than_torchruns_is_reported_by_rank_0_alone(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launched, "_PATIENCE", 0.0)
    for rank in (0, 1):
        become_rank(monkeypatch, rank, world_size=3)
        assert main([*command, str(tmp_path / "out"), "--world-size", "2"]) == 2
        err = capsys.readouterr().err
        assert ("does not fit the ranks that torchrun started\n  expected: 2 ranks" in err) == (rank == 0), err


def test_a_desk_is_this_machines_host_unless_torchrun_made_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_client([CASE], tmp_path, RunOptions(device="cpu")) as client:
        assert isinstance(client, Session)
    become_rank(monkeypatch, 0, world_size=3)
    with pytest.raises(CaseError, match="found: WORLD_SIZE=3"):
        open_client([CASE], tmp_path, RunOptions(device="cpu"))


def test_a_command_is_refused_under_torchrun_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_torchrun("shrink", "starts ranks of its own")
    become_rank(monkeypatch, 0)
    with pytest.raises(UsageError, match="shrink starts ranks of its own"):
        refuse_torchrun("shrink", "starts ranks of its own")


@pytest.mark.parametrize("task", ["0", "3"])
def test_srun_without_torchrun_is_refused_once_with_the_line_that_works(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each of the tasks would run all ranks."""
    monkeypatch.setenv("SLURM_PROCID", task)
    monkeypatch.setenv("SLURM_NTASKS", "16")
    assert main(["run", "-k", "unchunked", *SMALL, "--report-dir", str(tmp_path / "reports")]) == 2
    assert capfd.readouterr().err == (
        "UsageError: srun started 16 of this command, and each would run every rank\n"
        "  expected: one bitproof command, or the ranks of one, as torchrun starts them, one torchrun a machine\n"
        "  found: SLURM_PROCID=0 SLURM_NTASKS=16, and no RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT\n"
        '  fix: srun --ntasks-per-node=1 bash -c "torchrun --nnodes \\$SLURM_NNODES --nproc-per-node M --rdzv-id '
        '\\$SLURM_JOB_ID --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m bitproof ..."\n'
        "    with M ranks a machine, and HOST the first one\n"
    ) * (task == "0")
    assert not any((tmp_path / "reports").glob("*")), "nothing ran"


def test_only_a_rank_that_follows_waits_for_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(launched.interrupts, "wait", waited.append)
    launched.wait_for_rank_0()
    for rank in (0, 1):
        become_rank(monkeypatch, rank)
        launched.wait_for_rank_0()
    assert waited == [20.0]
    monkeypatch.setenv("GROUP_RANK", "1")
    launched.wait_for_rank_0()
    assert waited == [20.0], "another torchrun does not end rank 0"
