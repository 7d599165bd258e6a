"""The run folder: made before anything runs, filled at the end, whole or not at all."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path

from harness.errors import UsageError
from harness.records import Report
from harness.report import html, json, junit, markdown

LATEST = "latest"

FORMATS: dict[str, tuple[str, Callable[[Report], str]]] = {
    "html": ("report.html", html.render),
    "json": (json.FILE_NAME, json.render),
    "junit": ("junit.xml", junit.render),
    "md": ("report.md", markdown.render),
}


def check_format(format_name: str) -> None:
    """Raise UsageError, naming the formats that exist, for any other."""
    if format_name not in FORMATS:
        formats = " or ".join(sorted(FORMATS))
        raise UsageError("there is no such report format", expected=formats, found=repr(format_name))


def render_as(report: Report, format_name: str) -> str:
    """The report in one of FORMATS. Raises UsageError, naming those, for any other."""
    check_format(format_name)
    return FORMATS[format_name][1](report)


def prepare_run_dir(report_dir: Path) -> Path:
    """Make `<report_dir>/<run_id>/` and return it. Raises UsageError when a report could not be written there.

    The run id is the UTC time and a random suffix, so that runs of one second do not meet.
    """
    run_id = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"
    run_dir = report_dir / run_id
    try:
        run_dir.mkdir(parents=True)
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
    except UsageError:
        run_dir.rmdir()
        raise
    return run_dir


def write_run(report: Report, run_dir: Path) -> None:
    """Write every form of the report into `run_dir` and point `latest` beside it at the run.

    Everything is rendered before anything is written; report.json, the truth, goes first.
    """
    texts = {file_name: render(report) for file_name, render in FORMATS.values()}
    for file_name, content in texts.items():
        write_atomically(run_dir / file_name, content)
    _point_latest(run_dir)


def write_atomically(path: Path, content: str) -> None:
    """Write a text file that appears whole or not at all. What cannot be encoded is spelled out."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def is_reporting_rank(environment: Mapping[str, str] | None = None) -> bool:
    """Whether this process prints and writes the report: always, except on torchrun's ranks above 0."""
    environment = os.environ if environment is None else environment
    started_by_torchrun = all(name in environment for name in ("TORCHELASTIC_RUN_ID", "WORLD_SIZE", "RANK"))
    return not started_by_torchrun or environment["RANK"] == "0"


def _point_latest(run_dir: Path) -> None:
    """Replace the `latest` link in one step, so that it always points at a run."""
    _refuse_plain_latest(run_dir.parent)
    temporary = run_dir.parent / f".{LATEST}-{secrets.token_hex(6)}"
    temporary.symlink_to(run_dir.name, target_is_directory=True)
    try:
        os.replace(temporary, run_dir.parent / LATEST)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _refuse_plain_latest(report_dir: Path) -> None:
    latest = report_dir / LATEST
    if latest.exists() and not latest.is_symlink():
        raise UsageError(
            f"{latest} is in the way of the link to the newest run",
            expected="a symbolic link, or nothing",
            found="a folder" if latest.is_dir() else "a file",
            fix=f"move {latest} away, or choose another folder with --report-dir",
        )
