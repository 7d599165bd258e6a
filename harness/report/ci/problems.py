"""List the objections of a report, for the forms that CI systems read: SARIF and annotations.

An objection is an unexpected case, or a check's reason why a case is not as expected. It has the file and line of the
blamed call, if these are known.
"""

from __future__ import annotations

import glob
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from bitproof.harness.records import BlamedCall, CaseResult, Report
from bitproof.harness.report import text
from bitproof.harness.report.case_row import row_of
from bitproof.harness.report.status import SUCCESS, case_status

RULES = {
    "EQUAL": "A case is EQUAL and should not be, or a check objects",
    "CLOSE": "Some bits differ, within the bound that the case states, and should not",
    "DIFFERENT": "Two systems differ in bits that should agree",
    "NONDETERMINISTIC": "A system differs from itself",
    "UNVERIFIED": "Evidence is missing",
    "ERROR": "A rank died, raised or hung, or a pass refused the graph",
    "CHECK": "A check objects to a case, or could not judge it",
}
_MAX_DEPTH = 4
_MAX_PATH = 250
_SOURCE = re.compile(r"(.+):([1-9]\d{0,8})")


@dataclass(frozen=True, kw_only=True)
class Objection:
    """An unexpected result, for a code host.

    - `rule`: a key of RULES.
    - `fingerprint`: identifies the problem: it is the same in any run with this problem, even if lines move.
    - `path`, `line`: the source line of the blamed call, if known.
    """

    rule: str
    case: str
    message: str
    fingerprint: str
    path: str | None = None
    line: int | None = None


def objections(report: Report) -> Iterator[Objection]:
    for result in report.cases:
        if case_status(result) == SUCCESS:
            continue
        # A case may be as expected, and still have an objecting baseline or check.
        if not result.agrees_as_expected:
            yield _of_case(report, result)
        for name, reason in result.objections():
            message = f"{result.case.name}: check {name}: {reason}"
            yield _objection("CHECK", result, message, next(iter(result.checks[name].calls), None), name)


def _of_case(report: Report, result: CaseResult) -> Objection:
    row, first = row_of(result), result.first_divergence
    call = first.call if first else None
    parts = [f"{row.name}: {row.sentence}"]
    if first:
        parts.append(f"first at {row.where}")
        parts += [f"to blame: {blamed}"] if (blamed := text.blame(first)) else []
    if result.error:
        parts.append(result.error.splitlines()[0] if result.error.strip() else "")
    where = (first.kind, first.name) if first else ()
    return _objection(row.verdict, result, "; ".join(filter(None, parts)), call, *where)


def _objection(rule: str, result: CaseResult, message: str, call: BlamedCall | None, *more: str) -> Objection:
    path, line = place_of(call.source if call else None)
    case = result.case
    # Folders and line numbers differ between machines and commits, so only names of files are kept.
    known = [case.name, case.family, case.reference, case.candidate, rule, *more]
    known = [
        PurePosixPath(each.rpartition(":")[0]).name + each.rpartition(":")[2] if ":" in each else each for each in known
    ]
    known += [call.operator, str(call.module), str(call.direction), PurePosixPath(path or "").name] if call else []
    digest = hashlib.sha256(json.dumps(known).encode()).hexdigest()
    return Objection(rule=rule, case=case.name, message=message, fingerprint=digest[:32], path=path, line=line)


def place_of(source: str | None) -> tuple[str | None, int | None]:
    """Split a source such as `a/b/mine.py:9` into a pair: the path in the working tree, and the line number.

    A path that is no file in the working tree stays unchanged. Returns (None, None) for other texts, and for paths that
    lead out of the working tree.
    """
    # Reports only keep a path's last three parts, but code hosts need paths from the root.
    found = _SOURCE.fullmatch(source or "")
    if not found:
        return None, None
    parts = PurePosixPath(found[1]).parts
    # The source comes from a report, so it must not lead out of the working tree.
    if ".." in parts or parts[0] == "/" or len(found[1]) > _MAX_PATH or not found[1].isprintable():
        return None, None
    # The longest ending of the path that is a file, relative to the working directory.
    inner = next((_in_tree(Path(*parts[at:])) for at in range(len(parts)) if Path(*parts[at:]).is_file()), None)
    return inner or _below("/".join(parts)) or "/".join(parts), int(found[2])


def _in_tree(file: Path) -> str:
    real, root = file.resolve(), Path.cwd().resolve()
    return (real.relative_to(root) if real.is_relative_to(root) else file).as_posix()


def _below(end: str) -> str | None:
    # Only a few levels deep, since a tree may have millions of files. Of several such files, any might be wrong.
    name = glob.escape(end)
    found = {_in_tree(Path(path)) for depth in range(1, _MAX_DEPTH) for path in glob.iglob("*/" * depth + name)}
    return found.pop() if len(found) == 1 else None
