"""How large the project is, and how much of it a run loads: lines by room, and modules imported by an EQUAL `moe_seq`.

    python tests/benchmarks/bench_house.py            a minute: one run on two ranks with every import counted
    python tests/benchmarks/bench_house.py --lines    the lines alone, and those of each package of the core

Lines are those of git's files, blank ones and docstrings included; the second figure is without blank lines, comments
and docstrings. The core is what `POWERS` does not name. Modules are counted as their code runs, by an audit hook that
Python starts in every process of the run, so an import in a forked rank counts, too.
"""

from __future__ import annotations

import ast
import io
import os
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.figures import figure

ROOT = Path(__file__).parents[2]
PRODUCT = ("bitproof", "harness", "reference", "cases")
POWERS = {
    "proofs": (
        "harness/powers/proofs/",
        "harness/certificate_checker.py",
    ),
    "fault catalogue": (
        *(f"harness/disturb/{name}" for name in ("entry.py", "faults/", "graph_editor.py", "kinds.py", "mutate.py")),
        "harness/disturb/tamper.py",
        "harness/powers/mutants/",
    ),
    "sensitivity": ("harness/powers/sensitivity/",),
    "placement": ("harness/placement/", "harness/systems/autoplace.py"),
    "doctor": ("harness/powers/doctor/",),
    "shrink": ("harness/powers/shrink/",),
    "precompile": ("harness/precompile/",),
    "two layouts": ("harness/powers/two_layouts/",),
    "merge": ("harness/powers/merge/",),
    "side by side": ("harness/powers/side_by_side/",),
    "torchrun": ("harness/powers/torchrun/",),
    "baselines": ("harness/powers/baselines/",),
    "moved": ("harness/powers/moved/",),
}
"""The beginnings of the paths of what a case's verdict, report and cause do without."""

NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}

HOOK = """
import os, sys

def count(event, args):
    if event == "exec" and getattr(args[0], "co_name", "") == "<module>":
        os.write(at, f"{os.getpid()} {args[0].co_filename}\\n".encode())

at = os.open(os.environ["COUNT_IMPORTS_IN"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
sys.addaudithook(count)
"""


class Size(NamedTuple):
    """Lines of files: all of them, and those of code."""

    lines: int = 0
    code: int = 0


def size_of(text: str) -> Size:
    """The lines of a file, and those without blank lines, comments and docstrings."""
    documents = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    bodies = [node.body for node in ast.walk(ast.parse(text)) if isinstance(node, documents)]
    prose = {
        line
        for body in bodies
        for each in body
        if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant) and isinstance(each.value.value, str)
        for line in range(each.lineno, (each.end_lineno or each.lineno) + 1)
    }
    tokens = [each for each in tokenize.generate_tokens(io.StringIO(text).readline) if each.type not in NO_CODE]
    code = {line for each in tokens for line in range(each.start[0], each.end[0] + 1)}
    return Size(text.count("\n"), len(code - prose))


def sizes() -> tuple[dict[str, Size], dict[str, Size]]:
    """Lines of Python by power, `core` and `tests`, and those of the core by package."""
    rooms, packages = defaultdict[str, Size](Size), defaultdict[str, Size](Size)
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        if not name.startswith(("tests/", *PRODUCT)):
            continue
        size = size_of((ROOT / name).read_text())
        power = next((power for power, starts in POWERS.items() if name.startswith(starts)), "core")
        room = "tests" if name.startswith("tests/") else power
        rooms[room] = Size(*map(sum, zip(rooms[room], size, strict=True)))
        if room == "core":
            package = "/".join(name.split("/")[:2]) if name.count("/") > 1 else name.split("/")[0]
            packages[package] = Size(*map(sum, zip(packages[package], size, strict=True)))
    return rooms, packages


def imports_of_a_run(folder: Path) -> tuple[set[str], set[str]]:
    """Files of our modules that an EQUAL run of `moe_seq` imports: in all its processes, and in the command's own."""
    (folder / "sitecustomize.py").write_text(HOOK)
    counted = folder / "imports"
    environment = os.environ | {"PYTHONPATH": str(folder), "COUNT_IMPORTS_IN": str(counted)}
    command = ["run", "-k", "moe_seq", "--world-size", "2", "--steps", "2", "--report-dir", str(folder / "reports")]
    done = subprocess.Popen([sys.executable, "-m", "bitproof", *command], env=environment, stdout=subprocess.DEVNULL)
    if status := done.wait():
        raise SystemExit(f"the run ended with status {status}")
    seen: dict[str, set[str]] = {}
    for line in counted.read_text().splitlines():
        process, _, name = line.partition(" ")
        path = Path(name).resolve()
        if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PRODUCT:
            seen.setdefault(process, set()).add(str(path.relative_to(ROOT)))
    return set().union(*seen.values()), seen[str(done.pid)]


def main(words: list[str]) -> int:
    """Print both tables; 1 if a run imports more modules than the goal allows."""
    rooms, packages = sizes()
    product = Size(*map(sum, zip(*(size for room, size in rooms.items() if room != "tests"), strict=True)))
    for table in [rooms | {"product": product}, packages if "--lines" in words else {}]:
        for name, size in sorted(table.items(), key=lambda each: -each[1].lines):
            print(f"{name:28} {size.lines:7,} lines, {size.code:7,} of code")
        print()
    if "--lines" in words:
        return 0
    with tempfile.TemporaryDirectory(prefix="bitproof-house-") as folder:
        everywhere, command = imports_of_a_run(Path(folder))
    print(f"{'modules, all processes':28} {len(everywhere):7,}")
    print(f"{'modules, the command':28} {len(command):7,}")
    rooms = Counter(name.split("/")[1] if name.count("/") > 1 else "" for name in everywhere)
    print("  " + ", ".join(f"{room or 'top'} {size}" for room, size in rooms.most_common()))
    return figure("bench.house", len(everywhere))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
