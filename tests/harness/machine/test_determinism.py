"""What a system does to the switches that keep its run repeatable, and how it is told."""

from __future__ import annotations

import contextlib
import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from bitproof.harness import torch_compat
from bitproof.harness.capture.recording_files import read_manifest
from bitproof.harness.case.case_file import case_text
from bitproof.harness.cli import main
from bitproof.harness.errors import PassError
from bitproof.harness.machine.determinism import (
    Switches,
    describe_changes,
    first_changed,
    keeping_switches,
    read_switches,
    set_determinism,
    settle_attention,
)
from tests.harness.execute.test_launch import toy

SET = {"mkldnn_enabled": True, "num_threads": 1}
OFF = SET | {"mkldnn_enabled": False}


def readings(*found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return dict(zip(("set", "after_factory", "after_steps"), found, strict=True))


def test_a_switch_that_stays_as_it_was_set_is_not_reported() -> None:
    assert list(describe_changes(readings(SET, SET, SET))) == []


def test_a_switch_is_reported_with_what_it_was_what_it_is_and_where_it_was_changed() -> None:
    assert list(describe_changes(readings(SET, OFF, OFF))) == ["mkldnn_enabled True -> False by its factory"]
    assert list(describe_changes(readings(SET, SET, OFF))) == ["mkldnn_enabled True -> False in its steps"]


def test_what_torchs_first_attention_call_on_a_gpu_changes_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an H100's does, seen on torch 2.11."""
    before, orders = torch_compat.sdp_priority(), []

    def attend(*given: torch.Tensor) -> torch.Tensor:
        torch_compat.set_sdp_priority([*reversed(before)])
        orders.append(torch_compat.sdp_priority())
        return given[0]

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    settle_attention(torch.device("cpu"))
    assert orders == [[*reversed(before)]] and torch_compat.sdp_priority() == before


def test_the_lowest_rank_that_changed_a_switch_stands_for_all() -> None:
    same, changed = readings(SET, SET, SET), readings(SET, OFF, OFF)
    assert first_changed([same, changed]) is changed
    assert first_changed([same, same]) is same


CHANGES = {
    "mkldnn_enabled True -> False": lambda: torch._C._set_mkldnn_enabled(False),
    "flush_denormal False -> True": lambda: torch.set_flush_denormal(True),
    "num_threads 1 -> 2": lambda: torch.set_num_threads(2),
    "grad_enabled True -> False": lambda: torch.set_grad_enabled(False),
    "default_dtype float32 -> float64": lambda: torch.set_default_dtype(torch.float64),
    "default_device cpu -> meta": lambda: torch.set_default_device("meta"),
    "deterministic_warn_only False -> True": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "flash_sdp True -> False": lambda: torch.backends.cuda.enable_flash_sdp(False),
    "cudnn_sdp True -> False": lambda: torch.backends.cuda.enable_cudnn_sdp(False),
    "sdp_priority [1, 2, 0, 3, 4] -> [0, 1, 2, 3, 4]": lambda: torch._C._set_sdp_priority_order([0, 1, 2, 3, 4]),
    "mkldnn_rnn_precision none -> bf16": lambda: setattr(torch.backends.mkldnn.rnn, "fp32_precision", "bf16"),
    "float32_matmul_precision highest -> medium": lambda: torch.set_float32_matmul_precision("medium"),
    "the state of torch's random number generator": lambda: torch.rand(()),
    "the state of Python's random number generator": random.random,
    "the state of numpy's random number generator": numpy.random.rand,
}


@pytest.mark.parametrize("reported", CHANGES)
def test_a_pass_that_changes_the_process_is_named_with_what_it_changed_and_that_is_set_back(reported: str) -> None:
    set_determinism(0)
    was = Switches.now()
    with pytest.raises(PassError, match=re.escape(reported)) as caught, keeping_switches("pass mine"):
        CHANGES[reported]()
    assert caught.value.what.startswith("pass mine changes")
    assert set(was.changes()) <= {"mkldnn_matmul_precision none -> ieee"}  # `highest` says so from then on
    with keeping_switches("pass other"):
        pass


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_a_pass_that_puts_a_kernel_of_its_own_in_the_place_of_torch_s_is_named() -> None:
    with (
        torch.library._scoped_library("aten", "IMPL") as library,
        pytest.raises(PassError, match=r"kernels_in_python .*aten/hardsigmoid/CPU"),
        keeping_switches("pass mine"),
    ):
        library.impl("hardsigmoid", torch.relu, "CPU")
    with keeping_switches("pass other"), torch.library._scoped_library("bitproof_test_kernels", "DEF") as library:
        library.define("mine(Tensor x) -> Tensor")
        library.impl("mine", torch.relu, "CPU")


class Watches(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Watches(), BaseTorchFunctionMode()])
def test_a_pass_that_leaves_a_mode_is_named(mode: Any) -> None:
    with (
        pytest.raises(PassError, match=f"modes .*{type(mode).__name__}"),
        contextlib.ExitStack() as left,
        keeping_switches("pass mine"),
    ):
        left.enter_context(mode)


def test_the_switches_are_plain_values() -> None:
    assert json.loads(json.dumps(read_switches())) == read_switches()


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], one_host: None) -> Any:
    def run(candidate: str, *options: str) -> tuple[list[str], Path]:
        file = tmp_path / "case.json"
        file.write_text(case_text(replace(toy(candidate), steps=1)))
        main(["run", "--case", str(file), "--report-dir", str(tmp_path / "out"), "--no-control", *options])
        return capsys.readouterr().out.splitlines(), tmp_path / "out" / "latest"

    return run


@pytest.mark.ranks
def test_a_system_that_changes_switches_is_reported_and_every_reading_stands_in_its_manifest(run: Any) -> None:
    lines, folder = run("Loose")
    text = (
        "candidate tests.harness.toy_systems:Loose changed switches that bitproof had set: "
        "deterministic_algorithms True -> False by its factory, mkldnn_enabled True -> False in its steps"
    )
    assert f"toy: {text}" in lines
    [result] = json.loads((folder / "report.json").read_text())["cases"]
    assert (result["verdict"], result["remarks"]) == ("EQUAL", [text])
    for page in ("report.md", "report.html"):
        assert "changed switches that bitproof had set" in (folder / page).read_text()
    [loose, steady] = sorted((folder / "recordings" / "toy").iterdir())
    found = read_manifest(loose).switches
    names = ("deterministic_algorithms", "mkldnn_enabled")
    assert [[found[when][name] for name in names] for when in ("set", "after_factory", "after_steps")] == [
        [True, True],
        [False, True],
        [False, False],
    ]
    kept = read_manifest(steady).switches
    assert kept["set"] == kept["after_factory"] == kept["after_steps"]


@pytest.mark.ranks
def test_a_call_that_asks_for_graphs_of_systems_that_have_none_learns_that_there_are_none(run: Any) -> None:
    lines, folder = run("steady", "--dump-graphs")
    system = "tests.harness.toy_systems:steady"
    assert (
        "toy: --dump-graphs wrote nothing: only the passes of the systems graph, joint, autoplace, compiled are known, "
        "and neither "
        f"{system} nor {system} is among them"
    ) in lines
    assert not (folder / "graphs").exists()
