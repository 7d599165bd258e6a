"""Create the run folder before anything runs, and write the files of the run at the end, all or none.

They are written after the result was printed, so a failure to write does not suppress the result.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType

from bitproof.harness.errors import BitproofError, RecordingError, UsageError
from bitproof.harness.records import Report
from bitproof.harness.report import json, markdown
from bitproof.harness.report.ci import ci_lines, comment, junit, sarif
from bitproof.harness.report.status import error_status, worst

LATEST = "latest"


def _html(report: Report) -> str:
    from bitproof.harness.report.html import document

    return document.render(report)


FORMATS: dict[str, tuple[str, Callable[[Report], str]]] = {
    "html": ("report.html", _html),
    "json": (json.FILE_NAME, json.render),
    "junit": ("junit.xml", junit.render),
    "md": ("report.md", markdown.render),
    "sarif": ("report.sarif", sarif.render),
}
"""The forms of a report that are files, by name: the name of the file, and the function that renders it."""
PRINTED_ONLY: dict[str, Callable[[Report], str]] = {"annotations": ci_lines.render, "comment": comment.render}
"""The forms that are only printed."""


def check_format(format_name: str) -> None:
    """Raise UsageError for an unknown format; the error lists the known formats."""
    if format_name not in (known := {**FORMATS, **PRINTED_ONLY}):
        formats = " or ".join(sorted(known))
        raise UsageError("there is no such report format", expected=formats, found=repr(format_name))


def render_as(report: Report, format_name: str) -> str:
    """Return the report in a format of FORMATS or PRINTED_ONLY. Raises UsageError for any other format."""
    check_format(format_name)
    render = PRINTED_ONLY[format_name] if format_name in PRINTED_ONLY else FORMATS[format_name][1]
    return render(report)


def warm_up() -> None:
    """Import the libraries for the HTML page in advance, since this takes time."""
    from bitproof.harness.report.html import document

    document.template()


def prepare_run_dir(report_dir: Path) -> Path:
    """Create the folder `<report_dir>/<run_id>/` and return it. Raises UsageError if no report can be written there.

    The run id is the UTC time and a random suffix.
    """
    # The suffix makes folders of runs in the same second different.
    run_id = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"
    run_dir = report_dir / run_id
    try:
        run_dir.mkdir(parents=True)
        # Found before a run of hours instead of after it.
        _refuse_plain_latest(report_dir)
        with tempfile.TemporaryFile(dir=run_dir) as probe:
            probe.write(b"bitproof")
    except OSError as error:
        raise UsageError(
            "the report folder cannot be written",
            expected="a folder in which files can be made",
            found=f"{report_dir}: {error.strerror or error}",
            fix="choose another one with --report-dir",
        ) from error
    # No run begins, so no empty folder stays behind.
    except UsageError:
        run_dir.rmdir()
        raise
    return run_dir


def discard_if_bare(run_dir: Path) -> None:
    """Remove the run folder if it has no files, or only empty ones."""
    with suppress(OSError):
        if not any(path.is_file() and path.stat().st_size for path in run_dir.rglob("*")):
            shutil.rmtree(run_dir)


def finish_run(
    report: Report, run_dir: Path, status: int, more: Mapping[str, str] = MappingProxyType({}), shown: str = "report.md"
) -> int:
    """Write a report that was printed already. Print the path of the file `shown`, or why the report could not be
    written.

    `more` is as in `write_run`. Returns `status`, or a worse exit status if writing failed.
    """
    try:
        write_run(report, run_dir, more)
    except BitproofError as error:
        print(error, file=sys.stderr)
        status = worst([status, error_status(error)])
    if (run_dir / shown).is_file():
        print(f"report: {run_dir / shown}", flush=True)
    return status


def write_run(report: Report, run_dir: Path, more: Mapping[str, str] = MappingProxyType({})) -> None:
    """Write every form of the report into `run_dir`, and link `latest` to it.

    `more` maps file names to further texts. Raises RecordingError if a file cannot be written; in that case no file is
    written. Raises UsageError if `latest` exists and is no link.
    """
    try:
        # All forms are rendered before the first is written, so that an error in a form leaves no half of a report.
        texts = {file_name: render(report) for file_name, render in FORMATS.values()} | dict(more)
        _write_together(texts, run_dir)
    except Exception as error:  # a failing form is our own bug; the verdicts are already printed
        raise RecordingError(
            "the report cannot be written",
            found=(error.strerror if isinstance(error, OSError) else None) or f"{type(error).__name__}: {error}",
            where=str(run_dir),
            fix="the verdicts are those printed; make room, or choose another folder with --report-dir"
            if isinstance(error, OSError)
            else None,
        ) from error
    _point_latest(run_dir)


def _write_together(texts: Mapping[str, str], folder: Path) -> None:
    """Write files such that all of them appear in the folder or none. `texts` maps file names to contents."""
    aside = Path(tempfile.mkdtemp(dir=folder, prefix=".report-"))
    # Writing may fail, for example if the disk is full, so all files are written before the first is moved.
    placed: list[Path] = []
    try:
        for name, content in texts.items():
            write_atomically(aside / name, content)
        for name in texts:
            os.replace(aside / name, folder / name)
            placed.append(folder / name)
    except BaseException:
        for path in placed:
            path.unlink(missing_ok=True)
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def write_atomically(path: Path, content: str) -> None:
    """Write a text file whole or not at all. Characters that cannot be encoded are escaped."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
            file.write(content)
            file.flush()
            # Without this, a crash after the rename could leave an empty file.
            os.fsync(file.fileno())
        # mkstemp creates files for their owner only, but others read reports, e.g. a CI's upload.
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _point_latest(run_dir: Path) -> None:
    _refuse_plain_latest(run_dir.parent)
    # A link cannot be changed in place. A rename replaces the old link, so that `latest` points at some
    # run at every moment.
    temporary = run_dir.parent / f".{LATEST}-{secrets.token_hex(6)}"
    try:
        temporary.symlink_to(run_dir.name, target_is_directory=True)
        os.replace(temporary, run_dir.parent / LATEST)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise RecordingError(
            f"the report is written, and {run_dir.parent / LATEST} cannot be pointed at it",
            found=error.strerror or str(error),
            where=str(run_dir),
        ) from error


def _refuse_plain_latest(report_dir: Path) -> None:
    latest = report_dir / LATEST
    if latest.exists() and not latest.is_symlink():
        raise UsageError(
            f"{latest} is in the way of the link to the newest run",
            expected="a symbolic link, or nothing",
            found="a folder" if latest.is_dir() else "a file",
            fix=f"move {latest} away, or choose another folder with --report-dir",
        )
