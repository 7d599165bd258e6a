"""How large the project is, and how much of it a run loads: lines by room, and modules imported by an EQUAL `moe_seq`.

    python tests/benchmarks/bench_house.py            a minute: one run on two ranks with every import counted
    python tests/benchmarks/bench_house.py --lines    the lines alone

Lines are those of git's files, blank ones and docstrings included. The core is what `POWERS` does not name. Modules are
counted by an audit hook that Python starts in every process of the run, so an import in a forked rank counts, too.
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
        "harness/disturb/faults/",
        "harness/powers/mutants/",
    ),
    "sensitivity": ("harness/powers/sensitivity/",),
    "placement": ("harness/placement/",),
    "doctor": ("harness/powers/doctor/",),
    "shrink": ("harness/powers/shrink/",),
    "merge": ("harness/powers/merge/",),
    "torchrun": ("harness/powers/torchrun/",),
    "baselines": ("harness/powers/baselines/",),
    "moved": ("harness/powers/moved/",),
}
"""The beginnings of the paths of what a case's verdict, report and cause do without."""

HOOK = """
import os, sys

def count(event, args):
    if event == "import" and args[0].startswith("bitproof"):
        os.write(at, f"{os.getpid()} {args[0]}\\n".encode())

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
    """Our modules that an EQUAL run of `moe_seq` imports: in all its processes, and in the command's own."""
    (folder / "sitecustomize.py").write_text(HOOK)
    counted = folder / "imports"
    environment = os.environ | {"PYTHONPATH": str(folder), "COUNT_IMPORTS_IN": str(counted)}
    command = ["run", "-k", "moe_seq", "--world-size", "2", "--steps", "2", "--report-dir", str(folder / "reports")]
    done = subprocess.Popen([sys.executable, "-m", "bitproof", *command], env=environment, stdout=subprocess.DEVNULL)
    if status := done.wait():
        raise SystemExit(f"the run ended with status {status}")
    seen: dict[str, set[str]] = {}
    for line in counted.read_text().splitlines():
        process, name = line.split()
        if _is_ours(name):
            seen.setdefault(process, set()).add(name)
    return set().union(*seen.values()), seen[str(done.pid)]


def _is_ours(name: str) -> bool:
    """Whether a name is a module's: `import` also asks for the names that `from module import name` takes."""
    path = ROOT.joinpath(*name.split(".")[1:]) if name.split(".")[1:2] != ["bitproof"] else ROOT
    own = ROOT.joinpath(*name.split("."))
    return any(each.with_suffix(".py").is_file() or (each / "__init__.py").is_file() for each in (path, own))


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
    rooms = Counter(name.split(".")[2] if name.count(".") > 2 else "" for name in everywhere)
    print("  " + ", ".join(f"{room or 'top'} {size}" for room, size in rooms.most_common()))
    return figure("bench.house", len(everywhere))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
