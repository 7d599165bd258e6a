"""The command line, Python and pytest offer the same settings, with the same types and defaults."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import get_args, get_origin, get_type_hints

import pytest
import typer

import bitproof
from bitproof.harness.changes import Changes
from bitproof.harness.checks.shipped import shipped_checks
from bitproof.harness.cli.app import app
from bitproof.harness.cli.command_table import load_commands
from bitproof.harness.errors import UsageError
from bitproof.harness.options import RunOptions
from bitproof.harness.settings import Option, checked, from_options, options_of
from bitproof.keywords import (
    LocalizeSettings,
    ProveSettings,
    RecordSettings,
    RunSettings,
    SensitivitySettings,
    ShrinkSettings,
    read_settings,
)

CHECKS = tuple(check.Options for check in shipped_checks())
ALL = {each.keyword: each for part in (Changes, RunOptions, *CHECKS) for each in options_of(part)}
OF_A_CALL = {"expression", "case_files", "shard", "report_dir", "case", "system", "out", "force", "help"}
"""What both faces have as parameters of their own, or what chooses several cases and prints."""


def flags_of(command: str) -> dict[str, list[str]]:
    """The options of a command by keyword, without those that are its own."""
    load_commands([command])
    [found] = [each for name, each in typer.main.get_command(app).commands.items() if name == command]  # type: ignore[attr-defined]
    return {each.name: sorted(each.opts) for each in found.params if each.name not in OF_A_CALL}


TAKEN = {
    "run": RunSettings,
    "record": RecordSettings,
    "localize": LocalizeSettings,
    "bisect": LocalizeSettings,
    "shrink": ShrinkSettings,
    "prove": ProveSettings,
    "sensitivity": SensitivitySettings,
}
OF_A_FUNCTION = {
    "run": {"script", "reference_args", "candidate_args"},
    "shrink": {"tries", "timeout"},
    "prove": {"given", "until", "flavor", "layers", "certificate", "as_json", "as_table"},
    "sensitivity": {"names", "sample", "limit"},
}
"""What one command alone has: parameters of its function, or what `Case` states and what prints or writes."""


@pytest.mark.parametrize(("command", "taken"), TAKEN.items())
def test_python_takes_what_the_command_line_takes(command: str, taken: type) -> None:
    offered = flags_of(command)
    for keyword in OF_A_FUNCTION.get(command, ()):
        assert offered.pop(keyword)
    if command == "record":
        assert offered.pop("baseline") and offered.pop("baseline_dir"), "in Python `out` says where a recording goes"
    assert offered == {keyword: sorted(name.partition("/")[0] for name in ALL[keyword].names) for keyword in offered}
    left_out = {keyword for keyword in offered if ALL[keyword].command_line_only} - set(get_type_hints(taken))
    assert left_out <= {"no_control", "jobs"}
    systems = {"candidate", "reference"} & offered.keys()
    assert systems <= inspect.signature(bitproof.run).parameters.keys(), "in Python a system may be a function"
    found = set(get_type_hints(taken)) | ({"precompiled"} if command == "prove" else set())
    assert found == offered.keys() - left_out - systems


@pytest.mark.parametrize("taken", TAKEN.values())
def test_type_checkers_see_the_types_of_the_fields(taken: type) -> None:
    for keyword, kind in get_type_hints(taken).items():
        assert kind == in_python(ALL[keyword]), keyword


def in_python(option: Option) -> object:
    """Where a setting holds a tuple, a call may give any sequence."""
    return Sequence[get_args(option.kind)[0]] if get_origin(option.kind) is tuple else option.kind  # type: ignore[misc]


def test_a_call_without_settings_is_a_command_without_options() -> None:
    changes, options = read_settings("run", RunSettings, {}, Changes, RunOptions)
    assert (changes, options) == (Changes(), from_options(RunOptions, {}))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"device": "tpu"}, "device has no value that --device takes\n  found: 'tpu', not one of auto, cpu, cuda"),
        ({"timeout": float("nan")}, "timeout has no value that --timeout takes\n  found: nan, less than 1"),
        ({"timeout": 1e300}, "found: 1e+300 is not a number of seconds up to 1e+09."),
        ({"steps": 0}, "steps has no value that --steps takes\n  found: 0, less than 1"),
        ({"stress": "yes"}, "found: 'yes', neither True nor False"),
        ({"observe": "layers.*"}, "found: 'layers.*', no list of texts"),
        ({"stress_threads": 2}, "--stress-threads needs --stress"),
        ({"baseline_dir": "b"}, "--baseline-dir needs --baseline"),
    ],
)
def test_what_the_command_line_refuses_python_refuses(given: dict, text: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        bitproof.run("moe_seq", report_dir=tmp_path, **given)
    assert text in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_keyword_is_pythons_own_error() -> None:
    with pytest.raises(TypeError, match="run\\(\\) got an unexpected keyword argument 'jobs'"):
        bitproof.run("moe_seq", jobs=2)  # type: ignore[call-arg]


def test_a_misspelled_keyword_is_answered_with_the_nearest_one() -> None:
    with pytest.raises(
        TypeError, match=r"^run\(\) got an unexpected keyword argument 'world_sise': did you mean 'world_size'\?$"
    ):
        bitproof.run("moe_seq", world_sise=2)


@pytest.mark.parametrize("control", ["when-different", "when_different"])
def test_a_word_may_be_written_as_on_the_command_line(control: str) -> None:
    assert checked(RunOptions, {"control": control}) == {"control": "when_different"}
