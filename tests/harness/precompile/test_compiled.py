"""What Inductor compiled goes into a file and comes back as the very files that were written, for who trusts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule

from bitproof.harness.errors import ArtifactError
from bitproof.harness.graph.backend.backends import Compiled, CompiledHalves
from bitproof.harness.graph.backend.generated_code import hash_generated
from bitproof.harness.precompile import compiled, file
from bitproof.harness.precompile.compiled import read, write
from bitproof.harness.records import PassReport
from bitproof.harness.torch_inductor import WouldCompileError


@pytest.fixture(autouse=True)
def load(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands for running generated code: the file's text, with that of its one kernel."""

    def load_generated(main: Path) -> Callable[..., Any]:
        kernels = sorted(main.parents[1].rglob("*.so"))
        return lambda inputs: [main.read_text(), *(kernel.read_bytes() for kernel in kernels), *inputs]

    monkeypatch.setattr(compiled, "load_generated", load_generated)


def made(folder: Path, text: str = "x = 1\n", **besides: Any) -> Compiled:
    """A step as Inductor leaves it: its code, a kernel, the kernel's source, a lock."""
    contents = {
        "ab/cab.py": text.encode(),
        "cd/ccd.main.so": b"\x7fELF",
        "cd/ccd.main.cpp": b"//",
        "locks/ccd.lock": b"",
    }
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    facts = {"backend": "inductor", "generated_hash": hash_generated(folder)}
    step: Any = SimpleNamespace(cache_key="cab", **besides)
    return Compiled(step, folder, facts)


def described(facts: Any) -> list[PassReport]:
    return [PassReport("backend", 1.0, 1, 1, facts=facts)]


def refused(folder: Path, content: str, passes: list[PassReport], trust: bool = True) -> ArtifactError:
    with pytest.raises(ArtifactError) as error:
        read(folder, content, passes, trust)
    return error.value


def test_the_code_and_its_kernels_are_what_was_written_and_go_with_the_step(tmp_path: Path) -> None:
    step = made(tmp_path / "made")
    content = write(step, tmp_path)
    found = read(tmp_path, content, described(step.facts), trust_compiled=True)
    assert isinstance(found, Compiled) and found(1, 2) == ["x = 1\n", b"\x7fELF", 1, 2]
    assert found.facts == step.facts and found.folder != step.folder
    assert sorted(path.name for path in found.folder.rglob("*.*")) == ["cab.py", "ccd.main.so"]
    folder = found.folder
    del found
    assert not folder.exists()


def test_halves_come_back_as_halves(tmp_path: Path) -> None:
    forward, backward = made(tmp_path / "f", "x = 1\n"), made(tmp_path / "b", "x = 2\n")
    halves = CompiledHalves(forward, backward, (0, 2))
    found = read(tmp_path, write(halves, tmp_path), described(halves.facts), trust_compiled=True)
    assert isinstance(found, CompiledHalves) and found.read_again == (0, 2) and found.facts == halves.facts
    assert (found.forward.step([])[0], found.backward.step([])[0]) == ("x = 1\n", "x = 2\n")


def test_nothing_is_read_without_leave(tmp_path: Path) -> None:
    step = made(tmp_path / "made")
    content = write(step, tmp_path)
    (tmp_path / file.COMPILED).unlink()
    error = refused(tmp_path, content, described(step.facts), trust=False)
    assert error.what == "the precompiled step is compiled code, and nothing says that it may run"
    assert error.fix == "add --trust-compiled, if you trust everyone who can write the folder"
    assert refused(tmp_path, content, described(step.facts)).what == "there is no precompiled step's compiled code"


def test_code_of_another_step_is_refused_however_whole_it_is(tmp_path: Path) -> None:
    step = made(tmp_path / "made")
    content = write(step, tmp_path)
    write(made(tmp_path / "other", "x = 2\n"), tmp_path)
    error = refused(tmp_path, content, described(step.facts))
    assert error.what == "the compiled code beside the precompiled step is not the step's own"
    assert error.expected == f"sha256 {content}"
    assert "code of another hash than was compiled" in str(
        refused(tmp_path, file.read(tmp_path, file.COMPILED).content, described(step.facts))
    )


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda part: part.update(main="../../.bashrc"), "a path that Inductor would not write: '../../.bashrc'"),
        (lambda part: part["files"].update({"/etc/cron.d/x.py": ""}), "a path that Inductor would not write"),
        (lambda part: part["files"].update({"ab/cab.py": "no base64!"}), "a file that is no base64"),
        (lambda part: part["files"].update({"ef/cef.py": ""}), "code of another hash than was compiled"),
        (lambda part: part.pop("files"), "KeyError: 'files'"),
    ],
)
def test_a_forged_file_writes_nothing_outside_of_its_folder(change: Any, found: str, tmp_path: Path) -> None:
    step = made(tmp_path / "made")
    write(step, tmp_path)
    value = json.loads(json.dumps(file.read(tmp_path, file.COMPILED).value))
    change(value["parts"][0])
    content = file.write(tmp_path, value, file.COMPILED).content
    error = refused(tmp_path, content, described(step.facts))
    assert error.what == "the precompiled step's compiled code does not load" and found in str(error.found)


def test_a_kernel_that_would_have_to_be_compiled_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(main: Path) -> None:
        raise WouldCompileError("cxyz.main.so")

    monkeypatch.setattr(compiled, "load_generated", ask)
    step = made(tmp_path / "made")
    error = refused(tmp_path, write(step, tmp_path), described(step.facts))
    assert "a kernel would have to be compiled" in error.what and error.found == "cxyz.main.so"


@pytest.mark.parametrize(
    ("besides", "found"), [({"constants": {"c": 1}}, "constants"), ({"inputs_to_check": (3,)}, "inputs_to_check")]
)
def test_code_that_needs_more_than_itself_is_not_written(besides: Any, found: str, tmp_path: Path) -> None:
    write(made(tmp_path / "made", constants={}, inputs_to_check=()), tmp_path)
    with pytest.raises(ArtifactError) as error:
        write(made(tmp_path / "made", **besides), tmp_path)
    assert error.value.found == found
    (tmp_path / "made" / "ab" / "cab.py").unlink()
    with pytest.raises(ArtifactError, match="0 files of the name cab"):
        compiled._part(Compiled(SimpleNamespace(cache_key="cab"), tmp_path / "made", {}))  # type: ignore[arg-type]


def adding(number: float) -> Any:
    """Stands for a compiled region: adds a number, and its pickle is that number."""

    def add(x: torch.Tensor) -> torch.Tensor:
        return x + number

    add.number = number  # type: ignore[attr-defined]
    return add


@pytest.fixture
def regional(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiled:
    """A step with two regions: relu(x + 1) * x + 2 with compiled additions."""
    monkeypatch.setattr(
        compiled, "pickled_region", lambda called: str(called.number).encode() if hasattr(called, "number") else None
    )
    monkeypatch.setattr(compiled, "load_region", lambda pickled: adding(float(pickled)))
    graph = Graph()
    x = graph.placeholder("x")
    relu = graph.call_function(torch.ops.aten.relu.default, (graph.call_function(adding(1.0), (x,)),))
    product = graph.call_function(torch.ops.aten.mul.Tensor, (relu, x))
    graph.output((graph.call_function(adding(2.0), (product,)),))
    step = made(tmp_path / "made")
    return Compiled(GraphModule({}, graph), step.folder, step.facts)


def test_each_region_comes_back_in_its_place_in_the_graph(regional: Compiled, tmp_path: Path) -> None:
    found = read(tmp_path, write(regional, tmp_path), described(regional.facts), trust_compiled=True)
    x = torch.arange(4.0)
    inputs = [x]
    [result] = found.step(inputs)  # type: ignore[union-attr]
    assert torch.equal(result, (x + 1).relu() * x + 2) and inputs == []
    [part] = file.read(tmp_path, file.COMPILED).value["parts"]
    assert part.keys() == {"graph", "regions", "files"} and len(part["regions"]) == 2
    # What was compiled can be written again: its graph is as it was.
    write(regional, tmp_path)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda part: part["graph"]["nodes"][2].__setitem__(2, "aten.rand.default"), "operator that is not allowed"),
        (lambda part: part["regions"].pop(), "IndexError: list index out of range"),
        (lambda part: part["regions"].__setitem__(0, "no base64!"), "Error: "),
        (lambda part: part["files"].update({"ef/cef.py": ""}), "code of another hash than was compiled"),
    ],
)
def test_a_forged_graph_of_regions_is_refused(change: Any, found: str, regional: Compiled, tmp_path: Path) -> None:
    write(regional, tmp_path)
    value = json.loads(json.dumps(file.read(tmp_path, file.COMPILED).value))
    change(value["parts"][0])
    content = file.write(tmp_path, value, file.COMPILED).content
    error = refused(tmp_path, content, described(regional.facts))
    assert error.what == "the precompiled step's compiled code does not load" and found in str(error.found)


def test_a_region_whose_pickle_has_other_code_is_refused(
    regional: Compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(pickled: bytes) -> Any:
        # As torch does: the code is in the pickle, and goes into Inductor's folder before it runs.
        folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        (folder / "ef").mkdir(exist_ok=True)
        (folder / "ef" / "cef.py").write_text("x = 2")
        return adding(float(pickled))

    monkeypatch.setattr(compiled, "load_region", load)
    error = refused(tmp_path, write(regional, tmp_path), described(regional.facts))
    assert "code of another hash than was compiled" in str(error.found)


def test_a_graph_with_a_call_that_is_neither_region_nor_operator_is_not_written(
    regional: Compiled, tmp_path: Path
) -> None:
    [relu] = regional.step.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)  # type: ignore[attr-defined]
    relu.target = torch.relu
    with pytest.raises(ArtifactError) as error:
        write(regional, tmp_path)
    assert error.value.what == "a step that Inductor compiled region by region has no form as files"
    assert error.value.found == "UnkeptError: node relu_default calls what is no operator"


def test_a_region_that_torch_does_not_pickle_is_not_written(
    regional: Compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pickled(called: Any) -> bytes:
        raise TypeError("'NoneType' object is not callable")

    monkeypatch.setattr(compiled, "pickled_region", pickled)
    with pytest.raises(ArtifactError, match="found: TypeError: 'NoneType' object is not callable"):
        write(regional, tmp_path)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("case", ["experts_seq_regional", "halves_regional"])
def test_a_step_compiled_by_regions_runs_from_its_file_and_compiles_nothing(case: str, tmp_path: Path) -> None:
    def bitproof(*words: str) -> str:
        command = [sys.executable, "-m", "bitproof", *words]
        answer = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[3])
        assert answer.returncode == 0, answer.stdout + answer.stderr
        return answer.stdout

    step = str(tmp_path / "step")
    bitproof("precompile", case, "--out", step)
    folders = ("--report-dir", str(tmp_path / "reports"))
    # The reference compiles the same regions when it starts.
    trusted = (
        "--reference",
        "graph" if case != "halves_regional" else "joint",
        "--precompiled",
        step,
        "--trust-compiled",
    )
    described = bitproof("run", "-k", case, "--steps", "1", *trusted, *folders)
    assert "1 EQUAL" in described and "compiling nothing" in described
