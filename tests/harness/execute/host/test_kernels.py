"""Kernels that the host makes before it forks ranks: for which runs, and that ranks find them."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bitproof.builtin_cases import CASES
from bitproof.harness.case import Model, Precision
from bitproof.harness.execute.host import kernels
from bitproof.harness.execute.requests import RunRequest
from bitproof.harness.machine.devices import Placement

ROOT = Path(__file__).parents[4]
CASE = CASES["moe_seq"]


def request_of(system: str = "eager_chunked", device: Any = "cpu", **changes: Any) -> RunRequest:
    return RunRequest(
        case=replace(CASE, **changes),
        system=system,
        arm="first",
        placement=Placement(device=device),
        out=Path("out"),
        logs=Path("logs"),
        work=Path("work"),
        timeout=60.0,
        case_timeout=60.0,
    )


@pytest.mark.parametrize(
    ("request_", "made"),
    [
        (request_of(), [(64, 64, 128)]),
        (request_of("eager"), [(64, 64, 128)]),
        (request_of(steps=1), []),
        (request_of(steps=2), [(64, 64, 128)]),
        (request_of(batch=replace(CASE.batch, sequences=2, seq_len=4)), [(64, 64, 16)]),
        (request_of("graph"), []),  # a stage was forked from who made them for the reference
        (request_of("mine:system"), []),
        (request_of(device="cuda"), []),
        (request_of(precision=Precision(compute="float32")), []),
        (request_of(model=Model(family="llama3")), []),
    ],
    ids=str,
)
def test_kernels_are_made_for_long_runs_of_our_models_in_bfloat16(
    request_: RunRequest, made: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(kernels, "multiply", lambda *sizes: seen.append(sizes))
    kernels.make_kernels(request_)
    assert seen == made


SCRIPT = """
import os, sys
import torch
from bitproof.harness.execute.host.kernels import multiply
from bitproof.harness.machine.determinism import set_determinism
set_determinism(0)
ones = lambda *shape: torch.ones(*shape, dtype=torch.bfloat16)

def products(num_in, num_out):
    inputs, gradients, weight = ones(5, num_in), ones(5, num_out), ones(num_out, num_in)
    return inputs @ weight.t(), gradients @ weight, gradients.t() @ inputs

def section(name):
    sys.stdout.flush()
    os.write(1, f"-- {name}\\n".encode())

products(24, 40)
threads = len(os.listdir("/proc/self/task"))
section("made")
multiply(64, 96, 8)
assert len(os.listdir("/proc/self/task")) == threads, "whoever is forked would lack the new thread"
section("forked")
if os.fork() == 0:
    products(64, 96), products(96, 64)
    section("other shapes")
    products(72, 104)
    sys.stdout.flush()
    os._exit(0)
os.wait()
"""


@pytest.mark.ranks
def test_a_forked_rank_finds_the_kernels_and_no_thread_is_left_that_it_would_lack() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=os.environ | {"ONEDNN_VERBOSE": "profile_create", "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    sections = {part.partition("\n")[0]: part for part in done.stdout.split("-- ")[1:]}
    misses = {name: part.count("create:cache_miss") for name, part in sections.items()}
    assert misses["forked"] == 0
    assert (misses["made"] > 0) == (misses["other shapes"] > 0), "or this machine's products need none for a shape"
