"""`bitproof moved`: its subcommands, as functions that return the exit status."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from pathlib import Path

from bitproof.harness.errors import UsageError
from bitproof.harness.powers.moved.certificate_text import lines_of, markdown_of
from bitproof.harness.powers.moved.environments import Environment
from bitproof.harness.powers.moved.program_runs import ProgramRuns
from bitproof.harness.powers.moved.records import (
    NONDETERMINISTIC,
    NOT_REPLAYED,
    MovedCertificate,
    read_certificate,
    write_certificate,
)
from bitproof.harness.powers.moved.two_environments import TwoEnvironments
from bitproof.harness.report.status import SUCCESS, UNEXPECTED, UNJUDGED

CERTIFICATE, PAGE = "moved.json", "moved.md"


def record(folder: Path, program: ProgramRuns, *, budget: int, seconds: float) -> int:
    """Record a program's operator calls in `folder`, as an archive that can be replayed elsewhere.

    Returns the exit status. Raises UsageError if the folder is not empty.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError("the folder for the archive is not empty", expected="a new folder", found=str(folder))
    found = program.ask(Environment(), "record", folder, seconds, budget=budget)
    print(f"{found['calls']} distinct calls, {found['bytes']} bytes in {folder}")
    if found["drawn"]:
        print(f"  {found['drawn']} with inputs above the budget: drawn again from their distribution")
    return SUCCESS


def replay(comparison: TwoEnvironments, out: Path | None, *, as_json: bool) -> int:
    return _finish(comparison.replay(control=False), out, as_json=as_json)


def compare(comparison: TwoEnvironments, out: Path | None, *, as_json: bool) -> int:
    """Record a program's calls in the old environment, replay them in the new one, and print those that have moved.

    The program itself also runs in the new environment, to check whether the moved calls (those whose results change)
    explain its whole difference. Returns the exit status.
    """
    with tempfile.TemporaryDirectory(prefix="bitproof-moved-") as folder:
        comparison.folder = Path(folder, "archive")
        comparison.record()
        certificate = comparison.replay(control=True)
        verified = comparison.verify()
        if comparison.explains:
            comparison.explain()
        return _finish(comparison.finished(certificate, verified), out, as_json=as_json)


def check(path: Path, *, as_json: bool) -> int:
    return _finish(read_certificate(path), None, as_json=as_json)


def _finish(certificate: MovedCertificate, out: Path | None, *, as_json: bool) -> int:
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_certificate(out / CERTIFICATE, certificate)
        (out / PAGE).write_text(markdown_of(certificate))
    if as_json:
        print(json.dumps(asdict(certificate) | {"exit_status": status_of(certificate)}, indent=1))
    else:
        print("\n".join(lines_of(certificate)))
    return status_of(certificate)


def status_of(certificate: MovedCertificate) -> int:
    """Return the exit status for a certificate. The first rule that applies decides:

    1. Status 1 if a call moved or is missing, or the program differs.
    2. Status 3 if a call could not be judged, or there are no calls.
    3. Status 1 if an environment does not repeat its own bits.
    4. Otherwise status 0.
    """
    # The states of all calls that are not equal.
    states = {row.state for row in certificate.rows}
    if states - {NOT_REPLAYED, "failed", NONDETERMINISTIC} or certificate.verified.plain == "DIFFERENT":
        return UNEXPECTED
    if states & {NOT_REPLAYED, "failed"} or certificate.calls == 0:
        return UNJUDGED
    return UNEXPECTED if states or certificate.verified.plain == "NONDETERMINISTIC" else SUCCESS
