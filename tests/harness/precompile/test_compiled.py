"""What Inductor compiled goes into a file and comes back as the very files that were written, for who trusts it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bitproof.harness.errors import ArtifactError
from bitproof.harness.graph.backend import backends
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

    monkeypatch.setattr(backends, "load_generated", load_generated)


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

    monkeypatch.setattr(backends, "load_generated", ask)
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
