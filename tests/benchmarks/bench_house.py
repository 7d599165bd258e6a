"""How large the project is, and how much of it a run loads: lines by room, and modules imported by an EQUAL `moe_seq`.

    python tests/benchmarks/bench_house.py            a minute: one run on two ranks with every import counted
    python tests/benchmarks/bench_house.py --lines    the lines alone

Lines are those of git's files, blank ones and docstrings included. The core is what `POWERS` does not name. Modules are
counted as their code runs, by an audit hook that Python starts in every process of the run, so an import in a forked
rank counts, too.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

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

HOOK = """
import os, sys

def count(event, args):
    if event == "exec" and getattr(args[0], "co_name", "") == "<module>":
        os.write(at, f"{os.getpid()} {args[0].co_filename}\\n".encode())

at = os.open(os.environ["COUNT_IMPORTS_IN"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
sys.addaudithook(count)
"""


def lines_by_room() -> Counter[str]:
    """Lines of Python by power, `core` and `tests`."""
    found = Counter[str]()
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        size = (ROOT / name).read_bytes().count(b"\n")
        if name.startswith("tests/"):
            found["tests"] += size
        elif name.startswith(PRODUCT):
            found[next((power for power, starts in POWERS.items() if name.startswith(starts)), "core")] += size
    return found


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
    lines = lines_by_room()
    product = sum(size for room, size in lines.items() if room != "tests")
    for room, size in [*lines.most_common(), ("product", product)]:
        print(f"{room:28} {size:7,} lines")
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
