"""Code that Inductor generated is loaded from its files, and nothing is compiled for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from bitproof.harness.torch_inductor import generated_module

ROOT = Path(__file__).parents[2]


def test_what_a_compiled_graph_needs_besides_its_code_is_named() -> None:
    assert generated_module(SimpleNamespace(cache_key="cab")) == ("cab", [])
    step = SimpleNamespace(cache_key="cab", constants={"c": 1}, frozen_param_names={}, inputs_to_check=[0])
    assert generated_module(step) == ("cab", ["constants", "inputs_to_check"])


COMPILE = """
import sys, torch
from torch.fx.experimental.proxy_tensor import make_fx
from bitproof.harness.graph.backend.backends import compile_for
from bitproof.harness.precompile import compiled
from pathlib import Path

module = make_fx(lambda x: (torch.ops.aten.add.Tensor(torch.ops.aten.sin.default(x), 1.0),), tracing_mode="fake")(
    torch.ones(64)
)
step = compile_for(module, "inductor", {})
print(compiled.write(step, Path(sys.argv[1])))
print(repr(dict(step.facts)))
"""
LOAD = """
import sys, torch
from pathlib import Path
from bitproof.harness.errors import ArtifactError
from bitproof.harness.precompile import compiled
from bitproof.harness.records import PassReport

folder, content, facts = Path(sys.argv[1]), sys.argv[2], eval(sys.argv[3])
try:
    step = compiled.read(folder, content, [PassReport("backend", 0.0, 1, 1, facts=facts)], True)
    print(step(torch.zeros(64))[0].sum().item())
except ArtifactError as error:
    print(error.what, "|", error.found)
"""


def run(code: str, *arguments: str) -> list[str]:
    """What a fresh process prints, in which nothing was compiled before."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.ranks
def test_generated_code_runs_in_another_process_with_its_kernels_and_is_refused_without_them(tmp_path: Path) -> None:
    from bitproof.harness.precompile import file

    content, facts = run(COMPILE, str(tmp_path))
    assert run(LOAD, str(tmp_path), content, facts) == ["64.0"]
    value = file.read(tmp_path, file.COMPILED).value
    files = value["parts"][0]["files"]
    value["parts"][0]["files"] = {name: text for name, text in files.items() if name.endswith(".py")}
    without = file.write(tmp_path, value, file.COMPILED).content
    [reported] = run(LOAD, str(tmp_path), without, facts)
    assert "a kernel would have to be compiled" in reported and reported.endswith(".main.so")
