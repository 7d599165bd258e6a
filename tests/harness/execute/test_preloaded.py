"""Modules that a case wants imported once: imported, or refused with what to do."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import bitproof
from bitproof.harness.errors import UsageError
from bitproof.harness.execute.preloaded import preload


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def write(site: Path, name: str, text: str) -> str:
    (site / f"{name}.py").write_text(text)
    return name


def test_a_module_is_imported_once(site: Path) -> None:
    name = write(site, "counted_framework", "import sys\nsys.imports = getattr(sys, 'imports', 0) + 1\n")
    preload([name, name])
    preload([name])
    assert sys.imports == 1  # type: ignore[attr-defined]
    del sys.imports  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("import no_such_framework", "the preloaded module bad_framework imports no_such_framework, which is not"),
        (
            "1 / 0",
            "the preloaded module bad_framework cannot be imported\n  found: ZeroDivisionError: division by zero",
        ),
        (
            "import threading, time\nthreading.Thread(target=time.sleep, args=(5,), daemon=True).start()",
            "the preloaded module bad_framework leaves a process that cannot be forked safely",
        ),
    ],
)
def test_what_cannot_be_imported_or_forked_is_refused(site: Path, text: str, reported: str) -> None:
    name = write(site, "bad_framework", text)
    with pytest.raises(UsageError) as refused:
        preload([name])
    assert reported in str(refused.value)
    sys.modules.pop(name, None)


@pytest.mark.ranks
def test_ranks_find_a_preloaded_module_and_the_options_of_their_case(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "slow_framework", "import os\nIMPORTED_BY = os.getpid()\n")
    (tmp_path / "own.py").write_text(
        "import os, sys, torch, bitproof\n"
        "def make(case, mesh):\n"
        "    assert sys.modules['slow_framework'].IMPORTED_BY != os.getpid()\n"
        "    model = torch.nn.Linear(case.options['width'], 1)\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    def step(index):\n"
        "        loss = model(torch.ones(2, 3)).sum()\n"
        "        loss.backward()\n"
        "        optimizer.step()\n"
        "        return loss\n"
        "    return bitproof.watch(step, model=model, optimizer=optimizer, independent_ranks=True)\n"
    )
    case = {"reference": "own.py:make", "candidate": "own.py:make", "steps": 1, "options": {"width": 3}}
    (tmp_path / "own.json").write_text(json.dumps({"name": "own", "parallelism": {"world_size": 2}, **case}))
    run = bitproof.run(str(tmp_path / "own.json"), preload=["slow_framework"], control="never")
    assert run.verdict == "EQUAL", run
    with pytest.raises(UsageError, match="the preloaded module no_such_framework is not found"):
        bitproof.run(str(tmp_path / "own.json"), preload=["no_such_framework"], control="never")
