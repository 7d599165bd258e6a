"""`precompile` and `run --precompiled` as they are called: what runs, and what is refused, in which words."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cases import CASES
from harness.case import Case, Parallelism
from harness.cli import main
from harness.commands import precompile as command
from harness.errors import ArtifactError
from harness.execute.requests import PrecompileAnswer
from harness.precompile import file
from harness.records import Artifact
from tests.small import small

MADE = PrecompileAnswer(
    artifact=Artifact(
        fingerprint="f" * 64,
        content="c" * 64,
        case="moe_seq",
        system="graph",
        ranks=8,
        nodes=9,
        groups=1,
        bytes=1 << 19,
    ),
    trace_seconds=(1.0, 2.0),
    pass_seconds=3.0,
    write_seconds=0.1,
)


def test_it_tells_what_it_made_and_how_to_run_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[Case, Path]] = []

    def make(case: Case, out: Path, options: Any) -> PrecompileAnswer:
        asked.append((case, out))
        return MADE

    monkeypatch.setattr(command, "make", make)
    assert main(["precompile", "moe_seq", "--out", str(tmp_path), "--world-size", "4"]) == 0
    assert [(case.parallelism.world_size, out) for case, out in asked] == [(4, tmp_path)]
    assert capsys.readouterr().out == (
        "precompiled: graph of moe_seq for 8 ranks, 9 nodes, 1 process groups to make\n"
        "  traced in 1.0 s as rank 0 and 2.0 s as rank 7, to the same code; passes took 3.0 s\n"
        f"  fingerprint {'f' * 64}\n"
        f"  {tmp_path}: 0.50 MiB; run it: bitproof run -k moe_seq --precompiled {tmp_path}\n"
    )


def test_a_case_without_a_graph_and_a_step_that_fails_have_the_statuses_of_every_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["precompile", "moe_seq", "--out", str(tmp_path), "--candidate", "eager"]) == 2
    assert "the candidate of case moe_seq runs no graph" in capsys.readouterr().err

    def fail(case: Case, out: Path, options: Any) -> PrecompileAnswer:
        raise ArtifactError("the step of case moe_seq is not the same on every rank")

    monkeypatch.setattr(command, "make", fail)
    assert main(["precompile", "moe_seq", "--out", str(tmp_path)]) == 3
    assert "not the same on every rank" in capsys.readouterr().err


def _report(folder: Path) -> Any:
    [path] = folder.glob("2*/report.json")
    [case] = json.loads(path.read_text())["cases"]
    return case


def _small(tmp_path: Path, name: str, world_size: int = 2) -> Case:
    case = replace(small(CASES[name]), parallelism=Parallelism(world_size=world_size, ep=2), steps=1)
    (tmp_path / "case.json").write_text(json.dumps(case.to_dict()))
    return case


@pytest.mark.slow
@pytest.mark.ranks
def test_a_step_that_is_precompiled_runs_equal_to_eager_and_every_other_one_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _small(tmp_path, "moe_seq")
    case, step, told = str(tmp_path / "case.json"), tmp_path / "step", tmp_path / "reports"

    def run(name: str, *options: str) -> tuple[int, Any]:
        command = ["run", "--case", case, "--precompiled", str(step), "--no-control"]
        status = main([*command, "--report-dir", str(told / name), *options])
        return status, _report(told / name)

    assert main(["precompile", case, "--out", str(step)]) == 0
    fingerprint = capsys.readouterr().out.split("fingerprint ")[1].split()[0]
    status, result = run("equal")
    assert (status, result["verdict"]) == (0, "EQUAL")
    assert result["artifact"]["fingerprint"] == fingerprint and result["kept_graph"] is None
    assert any(fingerprint in remark for remark in result["remarks"])

    def refused(name: str, what: str, *options: str) -> None:
        status, result = run(name, *options)
        assert (status, result["verdict"]) == (3, "ERROR")
        for part in ("ArtifactError: ", what, "came from: ", "fix: ", "replay: bitproof run -k moe_seq --precompiled"):
            assert part in result["error"], part

    whole = (step / file.NAME).read_bytes()
    refused("world", "something else: world size", "--world-size", "4")
    for name, change in _changes().items():
        value = json.loads(json.dumps(file.read(step).value))
        change(value["fingerprint"])
        file.write(step, value)
        refused(name, f"something else: {name.replace('_', ' ')}")
        (step / file.NAME).write_bytes(whole)
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    (step / file.NAME).write_bytes(flipped)
    refused("damaged", "the precompiled step is damaged")
    (step / file.NAME).write_bytes(b"something else")
    refused("foreign", "the file is no precompiled step")
    (step / file.NAME).write_bytes(whole)
    assert main(["precompile", case, "--out", str(step), "--inject", "tokens-not-counted"]) == 2
    refused("stale", "was not finished, and what was there before is not used in its place")
    (step / file.NAME).unlink()
    refused("missing", "there is no precompiled step")


def _changes() -> dict[str, Callable[[Any], object]]:
    """Changes to a fingerprint, by field: of a case, a machine and a pass. All others are tried where it is read."""
    return {
        "shapes": lambda fields: fields["shapes"].update(seq_len=64),
        "torch": lambda fields: fields["torch"].__setitem__(0, "2.14.0"),
        "passes": lambda fields: fields["passes"][1].update(source="edited"),
    }


@pytest.mark.slow
def test_a_thousand_changed_bytes_are_a_thousand_refusals(tmp_path: Path) -> None:
    case = _small(tmp_path, "moe_seq")
    assert main(["precompile", str(tmp_path / "case.json"), "--out", str(tmp_path)]) == 0
    assert case.name == file.read(tmp_path).value["case"]
    path, draw = tmp_path / file.NAME, random.Random(0)
    whole = path.read_bytes()
    for place in draw.sample(range(len(whole)), 1000):
        other = whole[place] ^ draw.randrange(1, 256)
        path.write_bytes(whole[:place] + bytes([other]) + whole[place + 1 :])
        with pytest.raises(ArtifactError):
            file.read(tmp_path)
