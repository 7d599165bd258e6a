"""One name, one thing: no two public classes and no two files of one name, but those with a reason here; and tests use
what is public."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent
TOPS = ("bitproof", "cases", "harness", "reference")

# These lists only get shorter.
CLASSES = {
    "Block": "an example's own model, and the oracle's",
    "Evidence": "what two recordings show, and what a check judges by",
    "Table": "the terms of a proof, and a block of a report",
    "Call": "a call of a certificate's graph, and of a logged step",
}
FILES = {
    "a package's first file": ["__init__.py"],
    "a command's options, what it does, its records and its report": [
        *(
            "localize.py",
            "precompile.py",
        ),
        *("record.py", "report.py", "run.py", "shard.py"),
    ],
    "a family of cases or faults, and the module that these are about": [
        *("attention.py", "autoplace.py", "backends.py", "chunking.py", "collectives.py", "compiled.py", "fsdp.py"),
        *("gradients.py", "kernels.py", "memory.py", "models.py", "moe.py", "optimizer.py", "precompiled.py"),
        *("optimizers.py", "ranks.py", "tensor.py"),
    ],
    "a power's parts, and the core's": ["check.py", "cli.py", "command.py", "records.py"],
    "what is done, and its records": ["artifact.py", "partition.py"],
}
MOST_PRIVATE_NAMES = 20


def python_files(*tops: str) -> list[Path]:
    found = [path for top in tops for path in sorted((ROOT / top).rglob("*.py"))]
    return [path for path in found if not any(parent.is_symlink() for parent in path.relative_to(ROOT).parents)]


def shared(places: Mapping[str, list[str]]) -> set[str]:
    return {name for name, found in places.items() if len(found) > 1}


def public_classes(files: list[Path]) -> dict[str, list[str]]:
    found = defaultdict[str, list[str]](list)
    for path in files:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(str(path))
    return found


def private_names(source: str) -> Iterator[str]:
    """The private names of the product that a test imports, reads off what it imported, or replaces there."""
    tree, ours = ast.parse(source), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("bitproof"):
            ours |= {alias.asname or alias.name for alias in node.names}
            yield from (f"{node.module}.{alias.name}" for alias in node.names if _is_private(alias.name))
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(ast.Name(owner), name) if owner in ours and _is_private(name):
                yield f"{owner}.{name}"
            case ast.Call(ast.Attribute(_, "setattr"), [ast.Name(owner), ast.Constant(str(name)), *_]) if owner in ours:
                if _is_private(name):
                    yield f"{owner}.{name}"


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_no_two_public_classes_have_one_name() -> None:
    found = public_classes(python_files(*TOPS))
    assert len(found) > 300
    assert {name: places for name, places in found.items() if len(places) > 1}.keys() == CLASSES.keys()


def test_no_two_files_have_one_name() -> None:
    places = defaultdict[str, list[str]](list)
    for path in python_files(*TOPS):
        places[path.name].append(str(path))
    assert len(places) > 200
    assert shared(places) == {name for names in FILES.values() for name in names}


def test_tests_use_few_private_names() -> None:
    found = {f"{path.name}: {name}" for path in python_files("tests") for name in private_names(path.read_text())}
    assert len(found) <= MOST_PRIVATE_NAMES, sorted(found)


def test_each_way_to_use_a_private_name_is_seen() -> None:
    imported = "from bitproof.harness import store\n"
    for source in (
        "from bitproof.harness.store import _table",
        imported + "x = store._table",
        imported + "patch.setattr(store, '_table', 1)",
    ):
        assert len([*private_names(source)]) == 1, source
    assert [*private_names(imported + "x = store.table, store.__name__, other._table")] == []


def test_what_has_one_name_twice_is_seen(tmp_path: Path) -> None:
    for name, text in (
        ("a.py", "class Row: ..."),
        ("b.py", "class Row: ..."),
        ("c.py", "class _Row: ...\nclass Line: ..."),
    ):
        (tmp_path / name).write_text(text)
    assert shared(public_classes(sorted(tmp_path.iterdir()))) == {"Row"}
