"""The options of `bitproof localize` and `bitproof bisect`, and what a wrong call is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from bitproof.builtin_cases import CASES
from bitproof.harness.case.case_file import case_text
from bitproof.harness.cli import main

MODULES = {
    "localize": "bitproof.harness.commands.localize",
    "bisect": "bitproof.harness.powers.shrink.bisect_command",
}
each = pytest.mark.parametrize("command", MODULES)


@each
def test_a_case_is_looked_into_with_the_options_of_a_run(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = []
    monkeypatch.setattr(f"{MODULES[command]}.{command}", lambda *arguments: called.append(arguments) or 1)
    data = tmp_path / "text.txt"
    data.write_text("text")
    line = (
        f"--candidate graph --reference eager --steps 3 --world-size 4 --data {data} --inject flip-bit --device cpu "
        "--early-grad-accumulation --extra-pass a.b:c --extra-pass d:e@before=chunk"
    )
    assert main([command, "moe_seq", *line.split(), "--report-dir", str(tmp_path), "--timeout", "30"]) == 1
    [(case, options, report_dir, replay)] = called
    assert (case.name, case.reference, case.steps, case.parallelism.world_size) == ("moe_seq", "eager", 3, 4)
    assert (case.batch.data, case.chunking.early_grad_accumulation) == (str(data), True)
    assert (options.device, options.timeout, options.inject) == ("cpu", 30.0, "flip-bit")
    assert options.extra_passes == ("a.b:c", "d:e@before=chunk")
    assert report_dir == tmp_path
    assert sorted(replay) == sorted([*line.split(), "--timeout", "30.0"]), "a replay repeats what was given"


@each
def test_a_case_without_options_is_looked_into_as_it_is(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(f"{MODULES[command]}.{command}", lambda *arguments: called.append(arguments) or 0)
    assert main([command, "moe_seq"]) == 0
    assert [call[2:] for call in called] == [(Path("reports"), [])]


@each
def test_a_case_may_be_a_file_which_a_replay_names(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = []
    monkeypatch.setattr(f"{MODULES[command]}.{command}", lambda *arguments: called.append(arguments) or 0)
    file = tmp_path / "small.json"
    file.write_text(case_text(CASES["moe_seq"]))
    assert main([command, str(file), "--steps", "3"]) == 0
    [(case, _, _, replay)] = called
    assert (case.name, case.steps) == ("moe_seq", 3)
    assert replay == ["--steps", "3", "--case", str(file)]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["localize"], "Missing argument 'CASE'"),
        (["localize", "moe_sec"], "UsageError: no such case\n  expected: moe_seq"),
        (["localize", "moe_seq", "--data", "no/such/file"], "\n  found: no/such/file\n"),
        (["bisect"], "Missing argument 'CASE'"),
        (["bisect", "moe_sec"], "UsageError: no such case\n  expected: moe_seq"),
        (["bisect", "moe_seq", "--data", "no/such/file"], "\n  found: no/such/file\n"),
        (["bisect", "chunked_vs_unchunked"], "CaseError: case chunked_vs_unchunked "),
        (["bisect", "moe_seq", "--inject", "flip"], "UsageError: "),
        (["bisect", "moe_seq", "--extra-pass", "mine"], "\n  found: 'mine'\n"),
    ],
)
def test_a_wrong_call_ends_with_2_and_its_text_on_stderr(
    arguments: list[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--report-dir", str(tmp_path)] if len(arguments) > 1 else []
    assert main([*arguments, *options]) == 2
    out, err = capsys.readouterr()
    assert text in err and "Traceback" not in err
    assert out == "" and list(tmp_path.iterdir()) == []
