"""What a system's name means, and that a wrong one is told before anything starts."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from bitproof.harness.case import Case
from bitproof.harness.errors import UsageError
from bitproof.harness.records import Manifest
from bitproof.harness.systems.registry import (
    BUILT_IN,
    check_preload,
    check_system,
    load_factory,
    registered,
    sums_over_ranks,
)
from tests.distributions import install

ROOT = Path(__file__).parents[3]


def refusal(call, *arguments):
    with pytest.raises(UsageError) as error:
        call(*arguments)
    return str(error.value)


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder to import from, whose code must not run unless it is asked for."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", [*BUILT_IN, "tests.harness.toy_systems:steady", "tests/harness/toy_systems.py:shy"])
def test_a_system_that_is_there_is_accepted(name):
    check_system(name)


def test_checking_a_factory_runs_none_of_its_code(site):
    package = site / "package_that_raises"
    package.mkdir()
    for file in ("__init__.py", "loop.py"):
        (package / file).write_text("def make(case, mesh): pass\nraise SystemExit('it ran')\n")
    check_system("package_that_raises.loop:make")
    check_system("package_that_raises:make")
    check_system(f"{package}/loop.py:make")
    assert "package_that_raises" not in sys.modules


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("egaer", "did you mean eager?"),
        ("", None),
        ("loop:", None),
        (":make", None),
        ("loop.py:", "name a factory of the file, such as loop.py:make"),
    ],
)
def test_an_unknown_name_is_refused_with_those_that_are_known(name, fix, site):
    install(site, "mine", "[bitproof.systems]\nmy_loop = mine.loop:make\n")
    assert refusal(check_system, name) == (
        f"UsageError: unknown system {name!r}\n"
        "  expected: eager, eager_chunked, graph, joint, autoplace, precompiled, compiled, "
        "my_loop, package.module:factory or FILE.py:factory, or a script: train.py --lr 3e-4\n"
        f"  found: {name!r}" + (f"\n  fix: {fix}" if fix else "")
    )


@pytest.mark.parametrize("name", ["no_such_module:make", "tests.no_such_module:make", "tests.harness.ranks.deep:make"])
def test_a_module_that_is_not_there_is_refused(name):
    text = refusal(check_system, name)
    assert text.startswith(
        f"UsageError: the module of system {name} is not found\n"
        f"  expected: a module {name.partition(':')[0]} in the working directory, or installed\n"
    )
    assert text.endswith(
        "fix: run from the folder that holds the package, install it, or name a file: path/to/file.py:factory"
    )


def test_a_factory_that_its_file_does_not_have_is_refused_with_those_it_has(site):
    (site / "two_loops.py").write_text(
        "from os import path\nif path:\n    first = second = None\n"
        "class Third:\n    inner = 1\ndef make(): local = 1\nimport json.decoder, csv as table\n"
    )
    for name in ("first", "second", "Third", "make", "path", "json", "table"):
        check_system(f"two_loops:{name}")
    for name in ("two_loops:fist", f"{site}/two_loops.py:fist"):
        assert refusal(check_system, name) == (
            f"UsageError: {name.rpartition(':')[0]} has no factory fist\n"
            "  expected: a name that it has, such as first\n"
            f"  found: system {name}\n"
            f"  fix: did you mean {name.rpartition(':')[0]}:first?"
        )
    for name in ("inner", "local", "csv", "decoder"):
        assert "expected: a name that it has, such as " in refusal(check_system, f"two_loops:{name}")


def test_a_preloaded_module_that_is_not_there_is_refused_without_importing_those_that_are(site):
    (site / "raises_at_import.py").write_text("raise SystemExit('it ran')\n")
    names = ("raises_at_import", "json.decoder", "sys", "torch", "bitproof.harness")
    check_preload(Case(name="mine", family="own", reference="eager", candidate="eager", preload=names))
    assert "raises_at_import" not in sys.modules
    absent = Case(name="mine", family="own", reference="eager", candidate="eager", preload=("json", "no.such.module"))
    assert refusal(check_preload, absent).startswith("UsageError: the preloaded module no.such.module is not found\n")


@pytest.mark.parametrize("code", ["from os import *", "def __getattr__(name): ...", "globals().update(make=1)"])
def test_a_file_whose_names_only_running_it_can_show_is_accepted(site, code):
    (site / "dynamic.py").write_text(code)
    check_system(f"{site}/dynamic.py:make")


def test_a_file_that_cannot_be_read_or_is_not_python_is_refused(site):
    (site / "broken.py").write_text("def make(:\n")
    assert refusal(check_system, f"{site}/no.py:make") == (
        f"UsageError: the file of system {site}/no.py:make cannot be read\n"
        "  expected: a Python file\n"
        f"  found: {site}/no.py: No such file or directory"
    )
    assert refusal(check_system, f"{site}/broken.py:make").startswith(
        f"UsageError: the file of system {site}/broken.py:make is not Python\n"
    )


def test_an_entry_points_factory_is_checked_without_being_loaded(site):
    install(site, "mine", "[bitproof.systems]\ngood = mine_loop:make\nbad = mine_loop:mkae\n")
    (site / "mine_loop.py").write_text("def make(case, mesh): pass\nraise SystemExit('it ran')\n")
    check_system("good")
    assert refusal(check_system, "bad").startswith(
        "UsageError: mine_loop has no factory mkae\n  expected: a name that it has, such as make\n"
    )


def test_an_entry_point_that_claims_a_built_in_name_is_refused(site):
    install(site, "mine", "[bitproof.systems]\neager = mine.loop:make\n")
    for call in (registered, lambda: check_system("graph")):
        assert refusal(call) == (
            "UsageError: a distribution claims the name of the built-in system eager\n"
            "  expected: a name of its own for every system\n"
            "  found: mine.loop:make of mine 1.0\n"
            "  fix: uninstall it, or rename its entry point"
        )


def test_a_factory_is_loaded_from_a_module_a_file_or_an_entry_point(site):
    code = "class Loops:\n    @staticmethod\n    def make(case, mesh): return case, mesh\n"
    (site / "some_loops.py").write_text(code)
    install(site, "mine", "[bitproof.systems]\nloop = some_loops:Loops.make\n")
    origins = {
        "some_loops:Loops.make": {},
        f"{site}/some_loops.py:Loops.make": {"sha256": hashlib.sha256(code.encode()).hexdigest()},
        "loop": {"distribution": "mine 1.0"},
    }
    for name, origin in origins.items():
        factory = load_factory(name)
        assert (factory.make(1, 2), factory.origin) == ((1, 2), origin)


def test_a_file_may_define_dataclasses(site):
    (site / "data.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Loop:\n    case: int\n    mesh: int\n"
    )
    assert load_factory(f"{site}/data.py:Loop").make(1, 2).mesh == 2


def test_a_factory_that_cannot_be_imported_is_refused(site):
    (site / "needs_more.py").write_text("import no_such_module\nmake = None\n")
    assert refusal(load_factory, "needs_more:make") == (
        "UsageError: system needs_more:make imports no_such_module, which is not installed\n"
        f"  expected: no_such_module installed for {sys.executable}\n"
        "  found: ModuleNotFoundError: No module named 'no_such_module'\n"
        f"  fix: {sys.executable} -m pip install no_such_module, or the distribution that brings it; where it is a "
        "module of your own, run from the folder that holds it"
    )
    (site / "of_other_version.py").write_text("import json.no_such_part\n")
    assert "imports json.no_such_part, which the installed json does not have" in refusal(
        load_factory, f"{site}/of_other_version.py:make"
    )


def test_a_module_of_systems_that_is_not_there_is_refused_as_such(site):
    assert refusal(load_factory, "no_such_place:make") == (
        "UsageError: system no_such_place:make cannot be imported\n"
        "  found: ModuleNotFoundError: No module named 'no_such_place'\n"
        "  fix: run from the folder that holds the package, install it, or name a file: path/to/file.py:factory"
    )


@pytest.mark.ranks
def test_a_typo_ends_the_command_with_2_before_anything_starts(tmp_path):
    command = ["run", "-k", "moe_seq", "--candidate", "tests.harness.toy_systems:stedy", "--report-dir"]
    done = subprocess.run(
        [sys.executable, "-m", "bitproof", *command, str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "UsageError: tests.harness.toy_systems has no factory stedy" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_our_examples_are_named_by_their_module():
    check_system("bitproof.builtin_cases.examples.fsdp2_loop:plain")


def test_the_working_directory_is_searched_first_as_ranks_do(site, monkeypatch):
    for folder in (site / "here", site / "there"):
        folder.mkdir()
        (folder / "twice.py").write_text(f"def {folder.name}(case, mesh): pass\n")
    monkeypatch.syspath_prepend(site / "there")
    monkeypatch.chdir(site / "here")
    check_system("twice:here")
    assert "  expected: a name that it has, such as here\n" in refusal(check_system, "twice:there")


KERNEL = "by one Triton kernel"


@pytest.mark.parametrize(
    ("facts", "reported"),
    [
        ({"collectives": "shared"}, "in rank order by additions"),
        ({"collectives": "gloo"}, "in rank order by additions"),
        ({"collectives": "nccl", "machine": {"sums_over_ranks": KERNEL}}, f"in rank order {KERNEL}"),
        (
            {"collectives": "nccl", "machine": {"sums_over_ranks": ["rank 0: x", "rank 1: y"]}},
            "in rank order (rank 0: x; rank 1: y)",
        ),
        ({"collectives": "nccl"}, "in rank order"),
        ({"collectives": "native", "machine": {"sums_over_ranks": "NCCL's own"}}, "in NCCL's own order"),
        ({"collectives": None}, None),
        ({"collectives": "gloo", "world_size": 1}, None),
        ({"collectives": "gloo", "system": "loop.py:make"}, None),
    ],
)
def test_how_the_ranks_of_a_system_of_ours_added_is_said_from_its_manifest(facts, reported):
    manifest = Manifest(**{"case": {}, "system": "graph", "world_size": 2, "steps": 1} | facts)
    assert sums_over_ranks({"candidate": manifest}) == ({} if reported is None else {"candidate": reported})
