"""The command, with a new environment in which an operator has other bits."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

import bitproof
from bitproof.harness.cli import main
from bitproof.harness.powers.moved import environments
from bitproof.harness.powers.moved.environments import START
from bitproof.harness.processes.command import run_command

PROGRAM = """
import os
import torch

def forward():
    g = torch.Generator().manual_seed(1)
    x = torch.randn(4, 16, generator=g) * float(os.environ.get("PLANTED_SCALE", "1"))
    y = torch.relu(x)
    return y, x.exp()
"""
PLANT = """
import os, warnings, torch
if os.environ.get("PLANTED"):
    warnings.simplefilter("ignore")
    library = torch.library.Library("aten", "IMPL")
    def relu(x):
        y = x.clamp(min=0)
        y[..., -1] = torch.nextafter(y[..., -1], torch.tensor(9.0))
        return y
    library.impl("relu", relu, "CPU")
"""

pytestmark = pytest.mark.ranks


@pytest.fixture
def program(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(PROGRAM)
    Path("plant").mkdir()
    Path("plant", "sitecustomize.py").write_text(PLANT)
    return "model.py:forward"


def moved(capsys, *words):
    status = main(["moved", *words, "--json"])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_a_planted_move_is_named_and_accounts_for_the_whole_difference(program, capsys):
    env = ["--env", f"PYTHONPATH={Path('plant').resolve()}", "--env", "PLANTED=1", "--no-causes"]
    status, found = moved(capsys, program, *env, "--out", "cert")
    assert (status, [row["operator"] for row in found["rows"]]) == (1, ["aten.relu.default"])
    assert found["rows"][0]["where"] == "index 15 of dim 1"
    assert (found["verified"]["plain"], found["verified"]["with_exchange"]) == ("DIFFERENT", "EQUAL")
    assert main(["moved", "check", "cert/moved.json"]) == 1
    assert "these calls account for the whole difference" in capsys.readouterr().out
    assert "account for the whole difference" in Path("cert/moved.md").read_text()


@pytest.mark.slow
def test_a_difference_from_elsewhere_is_no_move_and_is_named_as_the_remainder(program, capsys):
    """A second difference, a changed setting, stays after the exchange."""
    env = ["--env", f"PYTHONPATH={Path('plant').resolve()}", "--env", "PLANTED=1", "--env", "PLANTED_SCALE=2"]
    status, found = moved(capsys, program, *env, "--no-causes")
    assert status == 1 and found["verified"]["with_exchange"] == "DIFFERENT"
    assert found["verified"]["remainder"].startswith("not from an operator: call 1 reads other values or arguments")
    assert "aten.mul.Tensor(tensor, 2.0), was aten.mul.Tensor(tensor, 1.0)" in found["verified"]["remainder"]


@pytest.mark.slow
def test_the_same_environment_moves_nothing(program, capsys):
    status, found = moved(capsys, program, "--env", "UNRELATED=1")
    assert (status, found["rows"], found["verified"]["plain"]) == (0, [], "EQUAL")


def test_an_archive_is_recorded_here_and_replayed_there(program, capsys):
    assert main(["moved", "record", "calls", program]) == 0
    capsys.readouterr()
    status, found = moved(capsys, "replay", "calls")
    assert (status, found["verified"]["plain"], found["equal"]) == (0, "not run", found["calls"])
    Path("calls/calls.json").write_text("{}")
    assert main(["moved", "replay", "calls"]) == 3
    assert "the archive of calls is refused; nothing in it was run" in capsys.readouterr().err


def test_wrong_calls_are_refused_before_anything_runs(program, capsys):
    Path("full").mkdir()
    Path("full", "x").touch()
    for words in (
        [program],
        ["record", "calls"],
        ["record", "full", program],
        ["replay"],
        ["check", "a", "b"],
        [program, "--env", "NOVALUE"],
        [program, "--to", "numpy"],
        [program, "--to", "torch==2.15.0", "--python", sys.executable],
        ["record", "new", "model.py:missing"],
        ["record", "new2", "absent.py"],
    ):
        assert main(["moved", *words]) == 2, words
    assert capsys.readouterr().err.count("UsageError") == 10


def test_the_standalone_program_runs_where_bitproof_is_not_installed(program, tmp_path):
    request = {"folder": "calls", "program": program, "arguments": [], "steps": 1, "budget": 1 << 20}
    Path("request.json").write_text(json.dumps(request))
    hide = "import sys, runpy; sys.modules['bitproof'] = None; sys.argv = sys.argv[1:]; "
    hide += "runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-c", hide, str(START), "record", "request.json", "answer.json"]
    assert subprocess.run(command, env=os.environ, timeout=300).returncode == 0
    assert json.loads(Path("answer.json").read_text())["calls"] >= 4


@pytest.mark.slow
def test_a_call_that_moves_on_later_values_alone_is_found_by_the_program_and_exchanged(program, capsys):
    """The replay sees a call's first values; `relu` differs on the second ones."""
    Path("model.py").write_text(PROGRAM.replace("return y", "return torch.relu(x * 4), y"))
    Path("plant", "sitecustomize.py").write_text(PLANT.replace("y[..., -1] =", "if x.max() > 4: y[..., -1] ="))
    status, found = moved(capsys, program, "--env", f"PYTHONPATH={Path('plant').resolve()}", "--env", "PLANTED=1")
    (row,) = found["rows"]
    assert (status, row["operator"], row["only_in_the_program"]) == (1, "aten.relu.default", True)
    assert (row["state"], row["shapes"], row["alone"]) == ("moved", [[4, 16]], "result result.0 at step 0")
    assert (found["equal"], found["verified"]["with_exchange"]) == (found["calls"] - 1, "EQUAL")


@pytest.mark.slow
def test_a_program_that_fails_in_the_new_environment_alone_is_shown_with_its_error(program, capsys):
    Path("model.py").write_text(
        PROGRAM.replace("return y", "assert not os.environ.get('PLANTED'), 'no such head'\n    return y")
    )
    assert main(["moved", program, "--env", "PLANTED=1"]) == 3
    reported = capsys.readouterr().err
    assert (
        "the program failed (exchange)" in reported
        and "AssertionError: no such head" in reported
        and sys.executable in reported
    )


@pytest.mark.slow
def test_calls_are_replayed_on_another_device_or_refused_where_there_is_none(program, capsys):
    """No machine without a GPU has another device with values, but one on which every call says where it ran."""
    assert main(["moved", "record", "calls", program]) == 0
    capsys.readouterr()
    status, found = moved(capsys, "replay", "calls", "--device", "meta")
    assert (status, found["equal"], found["new"]["device"]) == (3, 0, "meta")
    assert {row["state"] for row in found["rows"]} == {"failed", "not replayed"}
    assert all("meta" in row["detail"] or "the CPU's generator" in row["detail"] for row in found["rows"])
    assert main(["moved", "replay", "calls", "--device", "nowhere"]) == 3
    assert "this torch cannot use nowhere" in capsys.readouterr().err
    assert main(["moved", program, "--device", "cuda"]) == 2
    assert "a program chooses its own device" in capsys.readouterr().err


CACHES = """
import os
import torch

def forward():
    if not os.path.exists("cache.pt"):
        torch.save(torch.relu(torch.ones(4, 16)), "cache.pt")
    return torch.load("cache.pt") + 1
"""


@pytest.mark.slow
def test_a_program_that_reads_what_its_first_run_cached_is_not_equal(program, capsys):
    """The moved call ran in the old environment alone, so its effect cannot be seen."""
    Path("model.py").write_text(CACHES)
    env = ["--env", f"PYTHONPATH={Path('plant').resolve()}", "--env", "PLANTED=1", "--no-causes"]
    status, found = moved(capsys, program, *env)
    assert (status, found["verified"]["plain"]) == (1, "NONDETERMINISTIC")
    assert "a second run in the old environment differs" in found["verified"]["remainder"]
    status, found = moved(capsys, program, *env)
    assert found["verified"]["plain"] == "EQUAL", "a cache that is there before the command begins is input"


def test_an_installed_torch_sees_the_packages_of_this_python_but_not_its_torch(tmp_path, monkeypatch):
    """A script that imports other packages runs there, and a case finds the same bitproof."""

    def without_network(command, seconds, **options):
        if "venv" in command:
            return run_command([*command, "--without-pip"], seconds, **options)
        (own,) = Path(command[0]).parents[1].glob("lib/python*/site-packages")
        (own / "torch.py").write_text("__version__ = '9.9'")
        assert command[-1] == "torch==9.9", "only torch is installed"
        return run_command(["true"], seconds, **options)

    monkeypatch.setenv("BITPROOF_CACHE", str(tmp_path))
    monkeypatch.setattr(environments, "run_command", without_network)
    python = environments.installed("torch==9.9")
    shown = "import torch, numpy, bitproof; print(torch.__version__, numpy.__file__, bitproof.__file__)"
    found = subprocess.run([python, "-c", shown], capture_output=True, text=True, timeout=300, check=True, cwd="/")
    assert found.stdout.split() == ["9.9", numpy.__file__, bitproof.__file__]
    monkeypatch.setattr(environments, "run_command", None)
    assert environments.installed("torch==9.9") == python, "made once"
