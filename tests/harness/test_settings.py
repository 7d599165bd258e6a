from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from bitproof.harness.changes import Changes
from bitproof.harness.options import RunOptions, Stress
from bitproof.harness.powers.baselines.check import BaselineOptions
from bitproof.harness.runtime.disk_cache import default_folder
from bitproof.harness.settings import from_options, option_values, to_argv

KEEPS = RunOptions(kept_graphs=default_folder())


def test_what_is_at_its_default_is_not_repeated() -> None:
    assert to_argv(Changes(), KEEPS) == []
    assert to_argv(RunOptions()) == ["--no-kept-graph"]


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"timeout": 30.0, "profile": True, "dump_graphs": True}, "--dump-graphs --timeout 30.0 --profile"),
        ({"control": "when_different"}, "--control when-different"),
        ({"control": "never"}, "--no-control"),
        ({"stress": True, "stress_threads": 3}, "--stress --stress-threads 3"),
        ({"extra_passes": ("a.b:c", "d:e@before=chunk")}, "--extra-pass a.b:c --extra-pass d:e@before=chunk"),
        ({"every_call": True, "verify": False}, "--every-call --no-verify"),
        ({"jobs": "auto"}, ""),
    ],
)
def test_a_run_is_repeated_with_all_that_was_asked_for(given: dict, line: str) -> None:
    options = from_options(RunOptions, given)
    assert shlex.join(to_argv(options)) == line
    assert from_options(RunOptions, option_values(options)) == options


def test_files_are_named_so_that_any_folder_finds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("text")
    Path("names.json").write_text("{}")
    changes = from_options(Changes, {"data": "text", "candidate": "mine.py:make", "reference": "package.mine:make"})
    options = from_options(
        RunOptions,
        {
            "extra_passes": ("p.py:f@after=chunk",),
            "precompiled": "step",
            "names": Path("names.json"),
        },
    )
    assert to_argv(changes, options, from_options(BaselineOptions, {"baseline": True})) == [
        *("--candidate", f"{tmp_path}/mine.py:make", "--reference", "package.mine:make", "--data", f"{tmp_path}/text"),
        *("--extra-pass", f"{tmp_path}/p.py:f@after=chunk", "--precompiled", f"{tmp_path}/step"),
        *("--names", f"{tmp_path}/names.json", "--baseline", "--baseline-dir", f"{tmp_path}/baselines"),
    ]


def test_a_command_with_other_defaults_repeats_what_is_not_at_them() -> None:
    usual = {"steps": 2, "timeout": 120.0}
    assert to_argv(Changes(steps=2), from_options(RunOptions, {"timeout": 120.0}), usual=usual) == []
    assert to_argv(Changes(steps=2), from_options(RunOptions, {"timeout": 120.0})) == [
        "--steps",
        "2",
        "--timeout",
        "120.0",
    ]


@pytest.mark.parametrize("make", [lambda: Stress(num_threads=2), lambda: Stress()])
def test_stress_is_reported_as_it_was_asked_for(make: Callable[[], Stress]) -> None:
    options = RunOptions(stress=make())
    assert from_options(RunOptions, option_values(options)).stress == make()
