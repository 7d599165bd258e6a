"""What a proof costs over a model's depth: `python tests/benchmarks/bench_prove.py [--layers 4,61] [--ranks 8,64]`.

    [--cases transformer_batch,moe_batch,moe_seq] [--flavor 671B] [--every-pass] [--in-turn] [--no-certificate]
    [--keep DIR]

By default DeepSeek-V3's published dimensions, 4 and all 61 layers (3 of them dense), 4 sequences of 4,096 tokens, the
three chunkings, 8 ranks with ep 8 and 64 with ep 64, which takes half an hour; `make bench` asks for a part. Tensors
are fake, so nothing is computed. A configuration has a process of its own, so that its peak memory is its own. Told are
the seconds that pass until the reference is traced, the candidate is traced and rewritten, both are data, are compared
(terms made and hashed, outputs answered), and what follows the step is proved, which must hold for any number of steps.
The reference is traced meanwhile in a process of its own, as the command does it, or before with `--in-turn`. Told as
well are the CPU time and peak memory of both processes, and seconds to make and write the certificate of the whole
step; then each checker checks it as its own command, whose CPU time and peak memory are told.

Goals, on 2 cores: every output PROVED; 2 minutes and 3 GiB for tracing, passes and proof, 3 GiB with the certificate;
60 seconds to compare; 15 to read and check the certificate by the checker; and microseconds at the most layers at
most 1.3 times those at the fewest: a call's in the whole, a term's in comparing. (A layer with experts has more terms a
call, and of 4 layers 3 have none.) Returns 1 where one is missed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TypedDict

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.figures import figure

BUDGET_SECONDS, BUDGET_COMPARE, BUDGET_CHECK, BUDGET_GIB, BUDGET_GROWTH = 120, 60, 15, 3, 1.3


class Row(TypedDict):
    """One configuration's figures; `seconds` by stage. Memory is in GiB: that of the proof alone and with the
    certificate, the sum of both processes' peaks, and of each checker."""

    name: str
    proved: int
    outputs: int
    calls: int
    steps: int
    seconds: dict[str, float]
    cpu: float
    proof_gib: float
    peak_gib: float
    certificate: dict[str, float]


def measure(
    name: str, flavor: str, layers: int, ranks: int, every_pass: bool, in_turn: bool, folder: Path | None
) -> Row:
    """Prove one configuration in this process, and write its certificate into `folder`."""
    from bitproof.builtin_cases import CASES
    from bitproof.harness.case import Batch, Memory, Parallelism, Pipeline
    from bitproof.harness.powers.proofs.prover.certify import certificate_of, subject_of, write_certificate
    from bitproof.harness.powers.proofs.prover.prove import prove_case

    case = CASES[name]
    case = replace(
        case,
        model=replace(case.model, flavor=flavor, layers=layers),
        parallelism=Parallelism(world_size=ranks, ep=ranks, shared_groups=every_pass),
        batch=Batch(sequences=4, seq_len=4096),
    )
    if every_pass:
        pipeline = Pipeline(isolate_groups=True, bucket=True, overlap=True)
        case = replace(case, memory=Memory(policy="selective"), pipeline=pipeline)
    gc.disable()  # as the command does it, until a certificate is written
    found = prove_case(case, evaluate=False, follow=True, in_turn=in_turn)
    assert found.proof is not None and found.graphs is not None, found.reason
    assert found.update is not None and found.update.induction.holds, found.update
    assert found.update.proof is not None
    row = Row(
        name=f"{name}, {flavor}, {layers} layers, {ranks} ranks, ep {ranks}",
        proved=found.proof.count("PROVED"),
        outputs=len(found.proof.answers),
        calls=sum(len(graph.calls) for graph in found.graphs),
        steps=len(found.proof.table.steps),
        seconds=dict(found.seconds),
        cpu=sum(cpu_seconds(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)),
        proof_gib=peak_gib() + peak_gib(resource.RUSAGE_CHILDREN),
        peak_gib=0,
        certificate={},
    )
    if folder is not None:
        print(f"[{described(row)}]", file=sys.stderr, flush=True)
        began = time.perf_counter()
        subject = subject_of(case, found.update.proof, ())
        certificate = certificate_of(name, found.update.proof, subject)
        write_certificate(certificate, folder)
        row["certificate"] = {
            "made": time.perf_counter() - began,
            "MB": sum(file.stat().st_size for file in folder.iterdir()) / 1e6,
            "steps": len(certificate.steps),
        }
        row["peak_gib"] = max(row["proof_gib"], peak_gib())
    return row


def check(row: Row, folder: Path) -> None:
    """Have the checker accept a certificate, as the command and as a file alone, and add what that took.

    This process is small: a command's peak memory counts that of the process which starts it.
    """
    root = Path(__file__).parents[2]
    for checker, arguments in (
        ("command", ["-m", "bitproof", "check-certificate", str(folder)]),
        ("file", ["-I", str(root / "harness/certificate_checker.py"), str(folder)]),
    ):
        process = subprocess.Popen([sys.executable, *arguments], cwd=root, stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(process.pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0, arguments
        seconds = used.ru_utime + used.ru_stime
        row["certificate"] |= {checker: seconds, f"{checker}_gib": used.ru_maxrss / 2**20}


def peak_gib(who: int = resource.RUSAGE_SELF) -> float:
    """The most memory that this process, or the largest that ended below it, has had resident, in GiB."""
    return resource.getrusage(who).ru_maxrss / 2**20


def cpu_seconds(who: int) -> float:
    """The CPU time of this process, or of those that ended below it."""
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


def described(row: Row) -> str:
    """A configuration's line."""
    seconds = ", ".join(f"{stage} {value:.1f}" for stage, value in row["seconds"].items())
    line = (
        f"{row['name']}: {row['proved']} of {row['outputs']} PROVED; {row['calls']} calls, {row['steps']} terms; "
        f"{seconds}, together {total(row):.1f} s, {row['cpu']:.1f} CPU s ({micros(row, total(row)):.0f} us a call, "
        f"{micros(row, row['seconds']['compare']):.0f} to compare); {row['proof_gib']:.2f} GiB"
    )
    if found := row["certificate"]:
        line += (
            f"; certificate of {found['steps']} steps, {found['MB']:.1f} MB: made and written in {found['made']:.1f} s,"
            f" {row['peak_gib']:.2f} GiB with it"
        )
    if "command" in found:
        line += (
            f"; checked in {found['command']:.1f} CPU s and {found['command_gib']:.2f} GiB, "
            f"by the checker's file alone in {found['file']:.1f} and {found['file_gib']:.2f}"
        )
    return line


def total(row: Row) -> float:
    """Seconds of tracing, passes and proof."""
    return sum(row["seconds"].values())


def micros(row: Row, seconds: float) -> float:
    """Microseconds for each call of both graphs."""
    return 1e6 * seconds / row["calls"]


def micros_of_term(row: Row) -> float:
    """Microseconds for each term in comparing."""
    return 1e6 * row["seconds"]["compare"] / row["steps"]


def missed(row: Row, first: Row) -> list[str]:
    """The goals that a configuration misses; `first` is the same with the fewest layers."""
    compare, certificate = row["seconds"]["compare"], row["certificate"]
    checks = [certificate[checker] for checker in ("command", "file") if certificate]
    growth = micros(row, total(row)) / micros(first, total(first))
    compare_growth = micros_of_term(row) / micros_of_term(first)
    terms = row["steps"] / row["calls"] / (first["steps"] / first["calls"])
    print(
        f"  a call costs {growth:.2f} times what it costs in the first of these; in comparing a term "
        f"{compare_growth:.2f} times, of which a call has {terms:.2f} times as many"
    )
    misses = {
        "outputs are not PROVED": row["proved"] < row["outputs"],
        f"over {BUDGET_SECONDS} s": total(row) > BUDGET_SECONDS,
        f"over {BUDGET_COMPARE} s to compare": compare > BUDGET_COMPARE,
        f"over {BUDGET_CHECK} s for a checker": max(checks, default=0) > BUDGET_CHECK,
        f"over {BUDGET_GIB} GiB": max(row["proof_gib"], row["peak_gib"]) > BUDGET_GIB,
        f"a call's cost, or a term's, grew over {BUDGET_GROWTH} times": max(growth, compare_growth) > BUDGET_GROWTH,
    }
    return [goal for goal, is_missed in misses.items() if is_missed]


def main() -> int:
    """Prove each configuration in a process of its own, print its line; 1 where a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default="4,61", help="numbers of layers, the fewest first")
    parser.add_argument("--ranks", default="8,64", help="numbers of ranks, among all of which experts are spread")
    parser.add_argument("--cases", default="transformer_batch,moe_batch,moe_seq")
    parser.add_argument("--flavor", default="671B")
    parser.add_argument("--every-pass", action="store_true", help="with remat, isolation, bucketing and overlap")
    parser.add_argument("--in-turn", action="store_true", help="trace the reference first, in the same process")
    parser.add_argument("--no-certificate", action="store_true")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="a folder in which certificates stay")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        name, layers, ranks = options.measure[0], int(options.measure[1]), int(options.measure[2])
        passes, in_turn = options.every_pass, options.in_turn
        folder = None if options.no_certificate else options.keep
        print(json.dumps(measure(name, options.flavor, layers, ranks, passes, in_turn, folder)))
        return 0
    misses, row = 0, None
    with tempfile.TemporaryDirectory() as temporary:
        for name in options.cases.split(","):
            for ranks in options.ranks.split(","):
                first: Row | None = None
                for layers in options.layers.split(","):
                    folder = (
                        options.keep or Path(temporary)
                    ) / f"{name}-{options.flavor}-{layers}-layers-{ranks}-ranks"
                    command = [sys.executable, __file__, *sys.argv[1:], "--measure", name, layers, ranks]
                    if not options.no_certificate:
                        command += ["--keep", str(folder)]
                    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
                    row: Row = json.loads(done.stdout.splitlines()[-1])
                    if not options.no_certificate:
                        check(row, folder)
                    print(described(row), flush=True)
                    first = first or row
                    for goal in missed(row, first):
                        misses += 1
                        print(f"  MISSED: {goal}", flush=True)
    status = figure("bench.prove", total(row)) if row and options.cases == "moe_seq" else 0
    return status or int(misses > 0)


if __name__ == "__main__":
    sys.exit(main())
