"""Does any damaged file do more than be refused? `python tests/benchmarks/fuzz_readers.py [INPUTS] [SEED]`.

100,000 by default: reports, case files, recordings, of which baselines are made (their manifest, their table, and both
with sums that fit, as somebody with intent would leave them), values, logs of calls, names, fitted costs, histories,
faults that were found, certificates, and precompiled steps whose sum fits, each a valid file with one to three changes
of bytes, or of the JSON in it. A reader may accept a file, or refuse it as errors of ours. A traceback, a process that
ends, more than 4 GiB, or more than 30 s of the CPU or 10 minutes by the clock for one file, is a finding: its file is
kept, and the exit status is 1.
"""

from __future__ import annotations

import json
import math
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from bitproof.builtin_cases import CASES
from bitproof.harness.capture.recording_files import read_recording
from bitproof.harness.capture.values import open_values_of
from bitproof.harness.case import Case, Model, Parallelism
from bitproof.harness.case.case_file import case_text, read_case
from bitproof.harness.certificate_checker import FILES, RejectedError, check, parse, rejecting
from bitproof.harness.errors import BitproofError
from bitproof.harness.graph.passes.overlap.costs import CostLine, CostModel
from bitproof.harness.localize.logs.calls import Call, CallSite
from bitproof.harness.localize.logs.replay import StepTrace, packed_calls, read_log, write_archive
from bitproof.harness.machine.determinism import set_determinism
from bitproof.harness.options import ROLES
from bitproof.harness.powers.mutants.report import read_found, render_json
from bitproof.harness.powers.proofs.prover.certify import write_certificate
from bitproof.harness.precompile import file
from bitproof.harness.precompile.artifact import precompile, read_program
from bitproof.harness.records import BlamedCall, CaseResult, FaultOutcome, FaultsFound, Report, Verdict
from bitproof.harness.report import json as report_json
from bitproof.harness.user_code.names import read_names
from tests.benchmarks.fuzz_certificates import example
from tests.figures import figure
from tests.harness.forging import make_recording, vouch

SECONDS, BYTES = 30, 4 << 30
CASE = Case(name="fuzzed", family="test", reference="a:b", candidate="c:d", steps=2)
STEP = replace(CASES["moe_seq"], model=Model(layers=1, dense_layers=0), parallelism=Parallelism(world_size=2), steps=1)
CPU = torch.device("cpu")
FOUND = FaultsFound(
    outcomes=[
        FaultOutcome(
            fault="relu-for-silu",
            family="numerics",
            is_fault=True,
            says="another activation",
            source="ours",
            case="moe_seq",
            ranks=2,
            steps=1,
            status="killed",
            verdict=Verdict.DIFFERENT,
            kinds=("loss",),
            call=BlamedCall(operator="relu", module="layers.1.moe", direction="forward", chunk=1, rank=0),
            place_right=True,
        )
    ],
    own_digest="0" * 64,
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2**31, 2**63, 2**64, 10**400, 1e308, -0.0, float("nan"), float("inf")),
    *("", " ", "x" * 10_000, "\ud800", "\x00", "../..", "/etc/passwd", "EQUAL", "DIFFERENT", "0x1p+0", "nan", "é.β"),
    *([], {}, [[]], {"": {}}, [None] * 1000),
)


class Target(NamedTuple):
    """A reader, the file of its that is changed, its share of the inputs, and what mends sums after a change."""

    name: str
    file: Path
    read: Callable[[], object]
    share: int
    mend: Callable[[], None] = lambda: None


def targets(folder: Path) -> list[Target]:
    """A valid file of each kind, in `folder`."""
    result = CaseResult(
        case=CASE,
        verdict=Verdict.EQUAL,
        steps=CASE.steps,
        world_size=CASE.parallelism.world_size,
        compared={kind: 16 for kind in ("loss", "grad", "param", "buffer", "optimizer")},
        device="cpu",
        backend="gloo",
        control=dict.fromkeys(ROLES, Verdict.EQUAL),
        losses={role: [(2.0).hex()] * 16 for role in ROLES},
    )
    run = folder / "run"
    run.mkdir()
    report = Report(run_id="20260102T030405Z-abcdef", exit_status=0, environment={"torch": "2.13.0"}, cases=[result])
    report.faults = FOUND.score
    (run / "report.json").write_text(report_json.render(report))
    report_json.read(run / "report.json")
    (folder / "faults.json").write_text(render_json(FOUND))
    read_found(folder / "faults.json")
    steps = folder / "steps"
    precompile(STEP, "graph", CPU, steps)
    (steps / "step.json").write_text(json.dumps(file.read(steps).value))
    (folder / "case.json").write_text(case_text(CASE))
    recordings = {name: make_recording(folder / name, CASE) for name in ("plain", "manifest", "table", "values")}
    for name in ("names", "costs", "log"):
        (folder / name).mkdir()
    names, costs, log = folder / "names" / "names.json", folder / "costs" / "costs.json", folder / "log" / "rank0.zip"
    names.write_text(json.dumps({"model.*": "*", "a.*.w": "b.*.v", "embed": "tok_embeddings"}))
    line = CostLine(1e-6, 1e-9, 8, 0.9, 0.1)
    CostModel({"cpu": "Model T"}, {"memory": line, "all_gather_into_tensor/4": line}).save(costs)
    calls = [Call(CallSite("layers.0", "forward", number), "aten.mul", ("a" * 32,), ("b" * 32,)) for number in range(8)]
    write_archive(log, StepTrace(calls=calls))
    log.write_bytes(packed_calls(log))
    write_certificate(example(), folder / "certificate")

    def certificate() -> None:
        with rejecting():
            main, *graphs, steps = (parse((folder / "certificate" / name).read_bytes()) for name in FILES)
        check(main, graphs, steps, with_subject=False)

    return [
        Target("report", run / "report.json", lambda: report_json.read(run / "report.json"), 25),
        Target("case", folder / "case.json", lambda: read_case(folder / "case.json"), 15),
        Target("manifest", recordings["plain"] / "manifest.json", lambda: read_recording(recordings["plain"]), 5),
        Target(
            "manifest, sums fit",
            recordings["manifest"] / "manifest.json",
            lambda: read_recording(recordings["manifest"]),
            15,
            lambda: vouch(recordings["manifest"]),
        ),
        Target(
            "table, sums fit",
            recordings["table"] / "digests.parquet",
            lambda: read_recording(recordings["table"]),
            15,
            lambda: vouch(recordings["table"]),
        ),
        Target(
            "values, sums fit",
            recordings["values"] / "values" / "rank0.safetensors",
            lambda: read_values(recordings["values"]),
            1,
            lambda: vouch(recordings["values"]),
        ),
        Target("log of calls", log, lambda: read_log(log), 2),
        Target("names", names, lambda: read_names(names), 1),
        Target("costs", costs, lambda: CostModel.load(costs), 1),
        Target("faults", folder / "faults.json", lambda: read_found(folder / "faults.json"), 8),
        Target(
            "precompiled, sum fits",
            steps / "step.json",
            lambda: read_program(steps, STEP, "graph", CPU),
            2,
            lambda: pack(steps),
        ),
        Target("certificate", folder / "certificate" / "certificate.json", certificate, 4),
        Target("certificate's steps", folder / "certificate" / "steps.json", certificate, 3),
        Target("certificate's graph", folder / "certificate" / "candidate.json", certificate, 3),
    ]


def read_values(folder: Path) -> None:
    """Every tensor that rank 0 recorded, held against its digest."""
    recording = read_recording(folder)
    with open_values_of(folder, recording, 0) as values:
        for key, record in recording.records_of(0).items():
            values.read_recorded(key, record)


def pack(steps: Path) -> None:
    """Make a precompiled step of the JSON beside it; of what is no JSON, one that says so much."""
    try:
        value = json.loads((steps / "step.json").read_bytes())
    except (ValueError, RecursionError):
        value = None
    file.write(steps, value)


def changed(content: bytes, chance: random.Random) -> bytes:
    """The file with one to three changes: of the JSON that it is, or of bytes."""
    for _ in range(chance.randint(1, 3)):
        parsed = None
        if chance.random() < 0.7:
            with suppress(ValueError, RecursionError):
                parsed = json.loads(content)
        if isinstance(parsed, (dict, list)) and parsed:
            content = change_json(parsed, chance).encode(errors="surrogatepass")
        else:
            content = change_bytes(bytearray(content), chance)
    return content


def change_json(root: Any, chance: random.Random) -> str:
    """A JSON text with one place left out, renamed, repeated, replaced, or filled with what stands elsewhere."""
    at, places = root, []
    while isinstance(at, (dict, list)) and at:
        key = chance.choice(list(at)) if isinstance(at, dict) else chance.randrange(len(at))
        places.append((at, key))
        at = at[key]
        if chance.random() < 0.15:
            break
    parent, key = places[-1]
    match chance.randrange(5):
        case 0:
            del parent[key]
        case 1 if isinstance(parent, dict):
            parent[chance.choice(("", "x", "\ud800", str(key) + "_", "__class__"))] = parent.pop(key)
        case 2 if isinstance(parent, dict):
            text = json.dumps(root)
            return text.replace(f"{json.dumps(key)}:", f"{json.dumps(key)}: 1, {json.dumps(key)}:", 1)
        case 3:
            parent[key] = json.loads(json.dumps(chance.choice(places)[0]))
        case _:
            parent[key] = chance.choice(VALUES)
    return json.dumps(root)


def change_bytes(content: bytearray, chance: random.Random) -> bytes:
    """Bytes with a bit flipped, a part left out, repeated, overwritten, or put in."""
    at, size = chance.randrange(len(content) + 1), chance.choice((1, 2, 8, 64, 1024))
    match chance.randrange(6):
        case 0 if at < len(content):
            content[at] ^= 1 << chance.randrange(8)
        case 1:
            del content[at : at + size]
        case 2:
            content[at:at] = content[at : at + size]
        case 3:
            content[at : at + size] = chance.randbytes(size)
        case 4:
            del content[at:]
        case _:
            content[at:at] = chance.choice((b"\x00", b"\xff\xfe", b"[" * 100_000, b'{"":', b"9" * 5_000, b"\r\n", b","))
    return bytes(content)


def outcome(target: Target) -> str:
    """What became of a changed file. What is no error of ours is raised."""
    try:
        target.read()
    except (BitproofError, RejectedError):
        return "refused"
    return "read"


def fuzz(target: Target, inputs: int, seed: int, writer: int) -> None:
    """Read changed files, one after another, in a process of its own; a finding ends it, and its file stays."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])  # a long test run may have 4 GiB already
    most = BYTES + pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    chance, content, found = random.Random(f"{seed} {target.name}"), target.file.read_bytes(), Counter[str]()
    others = {x: x.read_bytes() for x in target.file.parent.iterdir() if x.is_file() and x != target.file}
    for _ in range(inputs):
        target.file.write_bytes(changed(content, chance))
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        signal.alarm(20 * SECONDS)  # by the clock, which a busy machine stretches: for what waits
        with suppress(ValueError, TypeError, AttributeError, RecursionError):  # nothing to mend in what is no manifest
            target.mend()
        found[outcome(target)] += 1
        for path, before in others.items():
            path.write_bytes(before)
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.alarm(0)
    target.file.write_bytes(content)  # the next kind of file may be read together with this one
    target.mend()
    os.write(writer, json.dumps(found).encode())


def in_a_process(target: Target, inputs: int, seed: int) -> Counter[str] | None:
    """What became of each input; None where the process did not finish."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            fuzz(target, inputs, seed, writer)
            status = 0
        except BaseException:
            traceback.print_exc()
        os._exit(status)
    os.close(writer)
    with open(reader, "rb") as pipe:
        text = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code:
        print(f"FOUND: {target.name}: the reader ended with {code}; the file is {target.file}")
        return None
    return Counter(json.loads(text))


def main(inputs: int = 100_000, seed: int = 0) -> int:
    """Run, print, and return 1 where a reader does anything but read or refuse."""
    set_determinism(STEP.seed)
    folder, good, tried = Path(tempfile.mkdtemp(prefix="bitproof-fuzz-")), 0, 0
    for target in targets(folder):
        count, began = inputs * target.share // 100, time.perf_counter()
        found, tried = in_a_process(target, count, seed), tried + count
        if found is None:
            continue
        good += found["refused"] + found["read"]
        seconds = time.perf_counter() - began
        print(
            f"{target.name:20} {count:7} inputs: {found['refused']:7} refused, {found['read']:6} read,"
            f" {seconds:4.0f} s",
            flush=True,
        )
    return figure("fuzz.readers", good / tried if tried else math.nan)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
