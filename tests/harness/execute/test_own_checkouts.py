"""A run depends on its own case alone: each system gets the modules that its own code would find.

Each layout below is two trainers whose packages differ in the learning rate, and one way to make one side find the
other's package.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from bitproof.harness.case.case_file import read_case
from bitproof.harness.execute.launch import run_cases
from bitproof.harness.options import RunOptions
from bitproof.harness.records import CaseResult

pytestmark = pytest.mark.ranks

TRAINER = """
import sys, site, importlib
from pathlib import Path
import torch, bitproof
HERE = Path(__file__).parent
def make():
    {imports}
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    def step(index):
        loss = model(torch.ones(2, 2)).sum()
        loss.backward()
        optimizer.step()
        return loss
    return bitproof.watch(step, model=model, optimizer=optimizer, independent_ranks=True)
"""
PLAIN = "from pkg.rates import RATE"


def trainer(path: Path, imports: str = PLAIN) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(TRAINER.format(imports=imports.strip().replace("\n", "\n    ")))


def package(folder: Path, rate: float, *, is_namespace: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if not is_namespace:
        (folder / "__init__.py").touch()
    (folder / "rates.py").write_text(f"RATE = {rate}\n")


@pytest.fixture
def judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[CaseResult]]:
    """Runs `old/check.py` against `new/check.py`, or others, once for each preload given, all on one host."""
    monkeypatch.chdir(tmp_path)

    def judge(
        *preloads: list[str],
        files: tuple[str, str] = ("old/check.py", "new/check.py"),
        folders: Sequence[str] = (),
        **options: object,
    ) -> list[CaseResult]:
        cases = []
        for number, preload in enumerate(preloads):
            path = tmp_path / f"case{number}.json"
            old, new = (f"{folders[number]}/{file}" if folders else file for file in files)
            values = {"reference": f"{old}:make", "candidate": f"{new}:make", "steps": 1, "preload": preload}
            path.write_text(json.dumps({"name": path.stem, "parallelism": {"world_size": 1}, **values}))
            cases.append(read_case(path))
        asked = RunOptions(device="cpu", control="never", explain_timeout=0.1, **options)  # type: ignore[arg-type]
        return list(run_cases(cases, asked, tmp_path / "run"))

    return judge


def verdicts(results: list[CaseResult]) -> list[str]:
    return [result.verdict for result in results]


def error_of(result: CaseResult) -> str:
    assert result.verdict == "ERROR" and result.error is not None, result
    return str(result.error)


def test_two_checkouts_of_one_package_differ_whatever_is_preloaded(tmp_path: Path, judged) -> None:
    for side, rate in (("old", 0.1), ("new", 0.5)):
        trainer(tmp_path / side / "check.py")
        package(tmp_path / side / "pkg", rate)
    assert verdicts(judged(["pkg.rates"], ["pkg"], [])) == ["DIFFERENT"] * 3


@pytest.mark.slow
def test_namespace_packages_and_modules_that_a_preload_imports_are_each_sides_own(tmp_path: Path, judged) -> None:
    for side, rate in (("old", 0.1), ("new", 0.5)):
        trainer(tmp_path / side / "check.py")
        package(tmp_path / side / "pkg", rate, is_namespace=True)
        (tmp_path / side / "big_framework.py").write_text("import pkg.rates\n")
    assert verdicts(judged(["pkg.rates"], ["big_framework"])) == ["DIFFERENT"] * 2


def test_a_package_on_pythonpath_is_hidden_by_the_one_beside_the_system(tmp_path: Path, judged, monkeypatch) -> None:
    trainer(tmp_path / "old" / "check.py")
    trainer(tmp_path / "new" / "check.py")
    package(tmp_path / "path" / "pkg", 0.1)
    package(tmp_path / "new" / "pkg", 0.5)
    monkeypatch.syspath_prepend(tmp_path / "path")  # which the host is given as PYTHONPATH
    assert verdicts(judged(["pkg.rates"], [])) == ["DIFFERENT"] * 2


def test_two_links_to_one_checkout_are_equal(tmp_path: Path, judged) -> None:
    package(tmp_path / "real" / "pkg", 0.1)
    for side in ("old", "new"):
        trainer(tmp_path / side / "check.py")
        (tmp_path / side / "pkg").symlink_to(tmp_path / "real" / "pkg")
    assert verdicts(judged(["pkg.rates"], [])) == ["EQUAL"] * 2


AS_EVER = "import importlib\nimport_module = importlib.import_module\n"
"""A module that is preloaded as well, and keeps a function that imports."""

MOVES = {
    "by a function kept before": (
        "from early import import_module\nsys.path.insert(0, str(HERE / 'vendored'))\n"
        "RATE = import_module('pkg.rates').RATE\ndel sys.path[0]"
    ),
    "in another working directory": (
        "import os\nsys.path.insert(0, '.')\nfrom early import import_module\nbefore = os.getcwd()\n"
        "os.chdir(HERE / 'vendored')\nfrom pkg.rates import RATE\nos.chdir(before)\ndel sys.path[0]"
    ),
    "and only asks where it is": (
        "import importlib.util as util\nsys.path.insert(0, str(HERE / 'vendored'))\n"
        "spec = util.find_spec('pkg.rates')\ndel sys.path[0]\nmodule = util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\nRATE = module.RATE"
    ),
    "first": "sys.path.insert(0, str(HERE / 'vendored'))\nfrom pkg.rates import RATE",
    "for a moment": "sys.path.insert(0, str(HERE / 'vendored'))\nfrom pkg.rates import RATE\ndel sys.path[0]",
    "as another list": "sys.path = [str(HERE / 'vendored'), *sys.path]\nfrom pkg.rates import RATE",
    "by name": "sys.path.insert(0, str(HERE / 'vendored'))\nRATE = importlib.import_module('pkg.rates').RATE",
    "in a package": "import pkg\npkg.__path__.insert(0, str(HERE / 'vendored' / 'pkg'))\nfrom pkg.rates import RATE",
    "and swallows it": (
        "sys.path.insert(0, str(HERE / 'vendored'))\n"
        "try:\n    import pkg.rates\nexcept Exception:\n    pass\n"
        "del sys.path[0]\nRATE = 0.1"
    ),
}


def test_a_system_that_moves_the_search_path_does_not_get_the_preloaded_module(tmp_path: Path, judged) -> None:
    folders = [f"here{number}" for number in range(len(MOVES))]
    for folder, moves in zip(folders, MOVES.values(), strict=True):
        here = tmp_path / folder
        trainer(here / "old.py")
        trainer(here / "new.py", moves)
        package(here / "pkg", 0.1)
        package(here / "vendored" / "pkg", 0.5)
        (here / "early.py").write_text(AS_EVER)
    results = judged(*[["pkg.rates", "early"]] * len(MOVES), files=("old.py", "new.py"), folders=folders)
    for how, result in zip(MOVES, results, strict=True):
        error = error_of(result)
        assert "the preloaded module pkg" in error and "is not the one that the system imports" in error, how
        assert "leave it out of `preload`" in error, how


@pytest.mark.slow
def test_a_folder_that_is_added_behind_changes_nothing(tmp_path: Path, judged) -> None:
    trainer(tmp_path / "here" / "old.py")
    trainer(tmp_path / "here" / "new.py", f"sys.path.append(str(HERE / 'vendored'))\n{PLAIN}")
    package(tmp_path / "here" / "pkg", 0.1)
    package(tmp_path / "here" / "vendored" / "pkg", 0.5)
    assert verdicts(judged(["pkg.rates"], files=("here/old.py", "here/new.py"))) == ["EQUAL"]


def test_a_case_finds_nothing_that_an_earlier_case_preloaded(tmp_path: Path, judged) -> None:
    imports = "assert ('loud' in sys.modules) == {}\nRATE = torch.rate if hasattr(torch, 'rate') else 0.1"
    (tmp_path / "loud.py").write_text("import torch\ntorch.rate = 0.5\n")
    trainer(tmp_path / "old" / "check.py", imports.format(True))
    trainer(tmp_path / "new" / "check.py", imports.format(False))
    trainer(tmp_path / "quiet.py")
    package(tmp_path / "pkg", 0.1)
    both = ("old/check.py", "old/check.py")
    assert verdicts(judged(["loud"], files=both)) == ["EQUAL"]
    loud, quiet = judged(["loud"], [], files=("new/check.py", "new/check.py"))
    assert "AssertionError" in error_of(loud)
    assert verdicts([quiet]) == ["EQUAL"]


def test_a_module_of_ours_is_not_taken_for_one_of_the_same_name_beside_the_system(tmp_path: Path, judged) -> None:
    trainer(tmp_path / "old" / "check.py", "from xxhash import RATE")
    trainer(tmp_path / "new" / "check.py", "RATE = 0.1")
    for side in ("old", "new"):
        (tmp_path / side / "xxhash.py").write_text("RATE = 0.1\n")
    (result,) = judged([])
    error = error_of(result)
    assert "imports xxhash, and this process has another module of that name" in error and "rename xxhash" in error
    assert verdicts(judged([], files=("new/check.py", "new/check.py"))) == ["EQUAL"]
