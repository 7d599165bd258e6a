"""`precompile` and `run --precompiled` as they are called: what runs, and what is refused, in which words."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bitproof.builtin_cases import CASES
from bitproof.harness.case import Case, Parallelism
from bitproof.harness.cli import main
from bitproof.harness.commands import precompile as command
from bitproof.harness.errors import ArtifactError
from bitproof.harness.execute import launch
from bitproof.harness.execute.requests import PrecompileAnswer
from bitproof.harness.execute.session import Session, open_session
from bitproof.harness.options import RunOptions
from bitproof.harness.precompile import file
from bitproof.harness.records import Artifact
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


def test_it_shows_what_it_made_and_how_to_run_it(
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
    assert "\n  found: candidate eager\n" in capsys.readouterr().err

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


@pytest.fixture
def one_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All commands of a test at one host, which imports torch once. What they are is otherwise untouched."""
    with open_session(tmp_path / "host", RunOptions(device="cpu")) as session:

        @contextmanager
        def client(cases: Any, run_dir: Path, options: RunOptions) -> Iterator[Session]:
            session.run_dir, session.options = run_dir, options
            yield session

        monkeypatch.setattr(launch, "open_client", client)
        yield


@pytest.mark.slow
@pytest.mark.ranks
def test_a_step_that_is_precompiled_runs_equal_to_eager_and_every_other_one_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], one_host: None
) -> None:
    _small(tmp_path, "moe_seq")
    case, step, reported = str(tmp_path / "case.json"), tmp_path / "step", tmp_path / "reports"
    path = step / file.NAME

    def run(name: str, *options: str) -> tuple[int, Any]:
        command = ["run", "--case", case, "--precompiled", str(step), "--no-control"]
        status = main([*command, "--report-dir", str(reported / name), *options])
        return status, _report(reported / name)

    assert main(["precompile", case, "--out", str(step)]) == 0
    fingerprint = capsys.readouterr().out.split("fingerprint ")[1].split()[0]
    status, result = run("equal")
    assert (status, result["verdict"]) == (0, "EQUAL")
    assert result["artifact"]["fingerprint"] == fingerprint and result["kept_graph"] is None
    assert any(fingerprint in remark for remark in result["remarks"])
    assert list((reported / "equal").rglob("rank*.log"))

    def refused(name: str, what: str, *options: str) -> None:
        status, result = run(name, *options)
        assert (status, result["verdict"]) == (3, "ERROR"), name
        for part in ("ArtifactError: ", what, "came from: ", "fix: ", "replay: bitproof run -k moe_seq --precompiled"):
            assert part in result["error"], (name, part, result["error"])
        assert not list((reported / name).rglob("rank*.log")), "no rank of either system has started"

    whole = path.read_bytes()
    value = file.read(step).value

    def rewritten(name: str, what: str, change: Callable[[Any], object]) -> None:
        other = json.loads(json.dumps(value))
        change(other)
        file.write(step, other)  # with a hash that is right
        refused(name, what)
        path.write_bytes(whole)

    assert len(value["fingerprint"]) > 20
    for name in value["fingerprint"]:
        field = name.replace("_", " ")
        rewritten(name, f"something else: {field}\n", lambda other, name=name: _change(other["fingerprint"], name))
    refused("world", "something else: world size\n", "--world-size", "4")
    rewritten("added", "something else: forged\n", lambda other: other["fingerprint"].update(forged=1))
    rewritten("dropped", "something else: costs\n", lambda other: other["fingerprint"].pop("costs"))
    rewritten("operator", "an operator that is not allowed", lambda other: _call(other, "aten.from_file.default"))
    rewritten("code", "it has other code than was kept", lambda other: _call(other, "aten.sub.Tensor"))
    rewritten("names", "of other parameters and buffers", lambda other: other["program"]["parameter_names"].reverse())
    rewritten("half", "says no program", lambda other: other.pop("program"))
    for name, content in {
        "damaged": whole[: len(whole) // 2] + bytes([whole[len(whole) // 2] ^ 1]) + whole[len(whole) // 2 + 1 :],
        "cut": whole[:-1],
        "longer": whole + whole,
    }.items():
        path.write_bytes(content)
        refused(name, "the precompiled step is damaged")
    for name, content in {
        "foreign": b"something else",
        "empty": b"",
        "older": whole.replace(b" 1 ", b" 0 ", 1),
    }.items():
        path.write_bytes(content)
        refused(name, "the file is no precompiled step")
    path.unlink()
    os.mkfifo(path)
    refused("pipe", "it is a pipe, not a regular file")
    path.unlink()
    path.write_bytes(whole)
    assert main(["precompile", case, "--out", str(step), "--inject", "tokens-not-counted"]) == 2
    refused("stale", "was not finished, and what was there before is not used in its place")
    path.unlink()
    refused("missing", "there is no precompiled step")


def _change(fields: Any, name: str) -> None:
    """Change a field of a fingerprint, whatever it holds, in one place."""
    value = fields[name]
    match value:
        case dict() if value:
            _change(value, next(iter(value)))
        case dict():
            value["another"] = 1
        case [first, *_] if isinstance(first, (dict, list)):
            _change(value, 0)
        case list():
            fields[name] = [*value, "another"]
        case bool() | int():
            fields[name] = value + 1
        case _:
            fields[name] = f"{value} "


def _call(value: Any, operator: str) -> None:
    """Have the first product call another operator."""
    next(node for node in value["program"]["graph"]["nodes"] if node[2] == "aten.mul.Tensor")[2] = operator


def test_compiled_code_is_refused_before_anything_starts_unless_the_call_trusts_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["run", "-k", "inductor_dense", "--precompiled", str(tmp_path / "step"), "--report-dir", str(tmp_path)]
    assert main(run) == 2
    assert "fix: add --trust-compiled, if you trust everyone who can write the folder" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    assert main(["run", "-k", "moe_seq", "--trust-compiled", "--report-dir", str(tmp_path)]) == 2
    assert "case moe_seq loads none" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.ranks
def test_a_compiled_step_is_run_and_compiles_nothing_and_other_code_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], one_host: None
) -> None:
    case = replace(small(CASES["inductor_dense"]), parallelism=Parallelism(world_size=2, ep=1), steps=1)
    (tmp_path / "case.json").write_text(json.dumps(case.to_dict()))
    step, reported = tmp_path / "step", tmp_path / "reports"

    def run(name: str) -> tuple[int, Any]:
        named = ["--case", str(tmp_path / "case.json"), "--precompiled", str(step), "--trust-compiled", "--no-control"]
        return main(["run", *named, "--report-dir", str(reported / name)]), _report(reported / name)

    assert main(["precompile", str(tmp_path / "case.json"), "--out", str(step)]) == 0
    printed = capsys.readouterr().out
    content = printed.split("compiled code, sha256 ")[1].split()[0]
    assert f"--precompiled {step} --trust-compiled" in printed
    status, result = run("close")
    assert (status, result["verdict"]) == (0, "CLOSE")
    assert result["artifact"]["compiled"] == content
    assert any("compiling nothing" in remark for remark in result["remarks"])

    compiled = step / file.COMPILED
    whole = compiled.read_bytes()
    compiled.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    status, result = run("damaged")
    assert status == 3 and "the precompiled step's compiled code is damaged" in result["error"]
    compiled.unlink()
    status, result = run("missing")
    assert status == 3 and "there is no precompiled step's compiled code" in result["error"]
    file.write(step, {"parts": [], "read_again": None}, file.COMPILED)
    status, result = run("other")
    assert status == 3 and "is not the step's own" in result["error"]
    assert "--trust-compiled" in result["error"].split("replay: ")[1]
    assert not list((reported / "other").rglob("rank*.log"))


@pytest.mark.slow
@pytest.mark.ranks
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
