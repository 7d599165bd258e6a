"""Do torch's operators do what their schemas say? `python tests/benchmarks/scan_operators.py [--write] [NAME ...]`.

Every overload of aten and prims for which arguments can be made, each in a process of its own, is called in several
layouts, dtypes and forms, on real values and on fake ones (`scan.py`). Printed is a row for each
that misbehaves, and counts. Status 1: an operator that a proof admits (`admitted.txt`) misbehaves, or did
not run at all. `--write` takes from that list what was contradicted, and leaves it the layouts in which nothing was:
another scan may have seen what this one did not, so nothing is added. Of NAMEs (`aten.add.Tensor`), which are scanned
alone, it writes the rows anew. With `--mixture` the admitted operators are called with tensors of several dtypes, and
the list of those that may be is checked, or written (`mixed_floats.txt`, `mixed_kinds.txt`); with `--every-mix` too,
with every pair of dtypes, in every way to share the two out among a call's tensors in rows. With `--json FILE` a scan
that was cut off goes on where it stopped.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import os
import random
import resource
import select
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from bitproof.harness.machine.determinism import set_determinism
from bitproof.harness.powers.proofs.prover.graphs import admitted
from bitproof.harness.torch_compat import OpOverload
from tests.figures import figure
from tests.harness.powers.proofs.scan import Scanned, is_to_be_tried, scan, try_call
from tests.harness.powers.proofs.scan_calls import by_stem, calls_of, operators, recorded, that_mix
from tests.harness.powers.proofs.scan_variants import Arguments, by_name, every_mix, tensors_of

AT_MOST = 40
MOST_MIXED = 160
"""Calls of several dtypes of which it is only compared how results lie: every pair of dtypes, more than once."""

BASES = 3
"""Calls of an operator of whose tensors every mix is tried."""

MOST_TRIED = 400
"""Calls of every pair of layouts after which no other call's are tried."""

WHOLE = 0.25
"""The share of calls in every pair of layouts whose bits are compared, too."""

LEAST, LEAST_MIXED = 3, 6
"""Calls in which an operator that is listed did as it says."""

CPU_SECONDS = 120
SECONDS = 1200
"""Time limits of one operator: of its process on a core, and, for one that waits, by the clock of a busy machine."""


def main() -> int:
    """Scan, print, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--write", action="store_true", help="take what misbehaved from the list of admitted operators")
    parser.add_argument("--calls", type=int, default=AT_MOST, help="calls of each operator that are to run")
    parser.add_argument("--samples", type=int, default=16, help="of torch's samples of each operator")
    parser.add_argument("--mixture", choices=admitted.MIXTURES, default=admitted.ALIKE, help="calls that mix dtypes so")
    parser.add_argument("--every-mix", action="store_true", help="every pair of dtypes, for any of a call's tensors")
    parser.add_argument("--json", type=Path, help="keep what was seen of each operator here, and go on from it")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)  # fake values that fail are counted
    set_determinism(given.seed, fill_uninitialized=False)
    start = time.monotonic()
    is_of_listed = given.mixture or given.every_mix
    tried = given.names or (admitted.names(given.mixture) if is_of_listed else None)
    ops = [op for op in operators() if tried is None or str(op) in tried]
    extent = "every mix" if given.every_mix else f"{given.calls} calls"
    settings = f"torch {torch.__version__}, {extent}, {given.samples} samples, {given.seed}"
    notes = Notes(given.json, " ".join([settings, given.mixture]).strip())
    found = notes.read()
    known = recorded(given.samples)
    halves = recorded(given.samples, (torch.bfloat16,)) if given.mixture else {}
    stems = by_stem(known, operators())
    seconds = time.monotonic() - start
    print(f"seed {given.seed}: {len(known)} operators have calls of torch's samples; {seconds:.0f} s", flush=True)

    def look(op: OpOverload) -> Scanned:
        calls = [*that_mix(op, halves, given.mixture), *calls_of(op, known, stems)]
        chance = random.Random(f"{given.seed} {op}")
        if given.every_mix:
            return scan_every_mix(op, calls, given.mixture, chance)
        layouts = MOST_MIXED if given.mixture else 0
        return scan(op, calls, at_most=given.calls, chance=chance, mixture=given.mixture, layouts=layouts)

    work = {str(op): functools.partial(look, op) for op in ops}
    scan_apart({name: each for name, each in work.items() if name not in found}, given.jobs, found, notes)
    found = {name: found[name] for name in work}
    least = LEAST_MIXED if given.mixture else LEAST
    honest = {name: layout for name, seen in found.items() if (layout := seen.honest_in(least))}
    status = print_findings(found, honest, time.monotonic() - start, given.mixture, partial=bool(given.names))
    if given.write:
        listed = admitted.names(given.mixture)
        kept = {name: layout for name, layout in listed.items() if name not in found}
        admitted.write(honest | kept if given.names else narrowed(listed, found, honest), given.mixture)
    return status


def scan_every_mix(op: OpOverload, calls: Iterable[Arguments], mixture: str, chance: random.Random) -> Scanned:
    """Try every mix that a proof takes of BASES calls' tensors, chosen by chance out of those that have other numbers
    of dims or other dtypes."""
    seen, bases = Scanned(), dict[Hashable, Arguments]()
    for call in calls:
        bases.setdefault(tuple((x.dim(), x.dtype) for x in tensors_of(call)), call)
    with torch.no_grad():
        for base in chance.sample([*bases.values()], min(BASES, len(bases))):
            if not mixture and seen.tried > MOST_TRIED:
                break
            for args in every_mix(op, base, mixture, chance):
                if is_to_be_tried(op, by_name(op, args), mixture):
                    seen.tried += 1
                    try_call(op, args, seen, is_whole=not mixture and chance.random() < WHOLE)
    return seen


def contradicts(seen: Scanned, layout: str) -> bool:
    """Whether an operator misbehaved that is admitted in a layout, and so in those before it."""
    upto = admitted.LAYOUTS[: admitted.LAYOUTS.index(layout) + 1]
    return seen.crashed or any(each in calls for calls in seen.faults.values() for each in upto)


def narrowed(allowed: Mapping[str, str], found: Mapping[str, Scanned], honest: Mapping[str, str]) -> dict[str, str]:
    """The list without what was contradicted: in the layouts in which nothing was wrong, or not at all."""
    wrong = {name for name, layout in allowed.items() if name in found and contradicts(found[name], layout)}
    kept = {name: honest.get(name) if name in wrong else layout for name, layout in allowed.items()}
    return {name: layout for name, layout in kept.items() if layout is not None}


def print_findings(
    found: dict[str, Scanned], honest: Mapping[str, str], seconds: float, mixture: str = "", *, partial: bool
) -> int:
    """Print what was seen. Returns 1 where an operator that a proof admits did otherwise, or did not run; else 0."""
    allowed = admitted.names(mixture)
    print(f"\n| operator | what it does | in | such a call |\n{'|---' * 4}|")
    for name, seen in found.items():
        for fault, calls in seen.faults.items():
            layout = next(layout for layout in admitted.LAYOUTS if layout in calls)
            print(f"| {name} | {fault} | {layout} | `{calls[layout][:200]}` |")
    faults = Counter(fault.split(",")[0].split(" of ")[0] for seen in found.values() for fault in seen.faults)
    ways = sum((Counter(seen.layouts) for seen in found.values()), Counter[str]())
    layouts = sum((Counter(seen.in_layout) for seen in found.values()), Counter[str]())
    print(f"\n{len(found)} operators, torch {torch.__version__}; {seconds:.0f} s")
    print(f"{sum(seen.tried for seen in found.values())} calls tried, {sum(seen.ran for seen in found.values())} ran")
    print(f"  by the way they were made: {dict(ways)}; by what was read: {dict(layouts)}")
    print(f"{sum(seen.fakes_fail for seen in found.values())} that ran fail on fake values, which a proof refuses")
    print(f"operators that ran: {sum(seen.ran > 0 for seen in found.values())}; that crashed or hung: ", end="")
    print(sum(seen.crashed for seen in found.values()))
    least = LEAST_MIXED if mixture else LEAST
    print(f"that did as they say, {least} times or more: {len(honest)}, {dict(Counter(honest.values()))}")
    for fault, count in faults.most_common():
        print(f"  {count:5} {fault}")
    wrong, idle = [], []
    for name, layout in allowed.items():
        if name in found:
            seen = found[name]
            if contradicts(seen, layout):
                wrong.append(name)
            elif not seen.ran:
                idle.append(name)
    print(f"admitted: {len(allowed)}; of these misbehave: {', '.join(wrong) or 'none'}")
    gone = 0 if partial else len({*allowed} - {*found})
    print(f"  did not run: {', '.join(idle) or 'none'}; {gone} are no operators of this torch")
    if partial or mixture:
        return int(bool(wrong or idle))
    return figure("operators", 1 - len({*wrong, *idle}) / len(allowed)) or int(bool(wrong or idle))


@dataclass
class _Child:
    """A process that scans one operator, and what it has said so far."""

    name: str
    pid: int
    pipe: int
    deadline: float
    data: bytes = b""

    def read(self) -> bool:
        """Take what it says. Returns whether it goes on."""
        part = os.read(self.pipe, 1 << 16)
        self.data += part
        return bool(part)

    def end(self) -> Scanned:
        """What came of it; it is ended if it still runs."""
        if time.monotonic() > self.deadline:
            os.kill(self.pid, signal.SIGKILL)
        os.close(self.pipe)
        _, status = os.waitpid(self.pid, 0)
        if status or not self.data:
            print(f"{self.name} ended its process, status {status}", file=sys.stderr, flush=True)
            return Scanned(crashed=True)
        return Scanned(**json.loads(self.data))


@dataclass
class Notes:
    """A file of what was seen so far by a scan with these settings; one of other settings is begun anew."""

    file: Path | None
    settings: str

    def read(self) -> dict[str, Scanned]:
        """What an earlier scan that was cut off saw."""
        if self.file is None or not self.file.exists():
            return {}
        kept = json.loads(self.file.read_text())
        if kept["settings"] != self.settings:
            return {}
        print(f"{len(kept['found'])} operators were scanned before ({self.file})")
        return {name: Scanned(**seen) for name, seen in kept["found"].items()}

    def write(self, found: Mapping[str, Scanned]) -> None:
        """Keep what was seen; the file is there whole or as it was."""
        if self.file is not None:
            kept = {"settings": self.settings, "found": {name: asdict(seen) for name, seen in found.items()}}
            part = self.file.with_suffix(".part")
            part.write_text(json.dumps(kept, indent=1))
            part.replace(self.file)


def scan_apart(work: Mapping[str, Callable[[], Scanned]], jobs: int, found: dict[str, Scanned], notes: Notes) -> None:
    """Put what each piece of work returns into `found`. Each has its own process: an operator may end it, or hang."""
    waiting, running, num_before = list(work), list[_Child](), len(found)
    while waiting or running:
        while waiting and len(running) < jobs:
            running.append(_start(waiting[0], work[waiting.pop(0)]))
        said, _, _ = select.select([child.pipe for child in running], [], [], 1.0)
        for child in list(running):
            if (child.pipe in said and not child.read()) or time.monotonic() > child.deadline:
                running.remove(child)
                found[child.name] = child.end()
                if (len(found) - num_before) % 10 == 0:
                    print(f"  {len(found)} of {len(work) + num_before}", file=sys.stderr, flush=True)
                    notes.write(found)
    notes.write(found)


def _start(name: str, work: Callable[[], Scanned]) -> _Child:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read)
            resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            data = json.dumps(asdict(work())).encode()
            with os.fdopen(write, "wb") as out:
                out.write(data)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(write)
    return _Child(name, pid, read, time.monotonic() + SECONDS)


if __name__ == "__main__":
    sys.exit(main())
