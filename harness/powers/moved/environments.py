"""An environment: a Python with torch, and environment variables. Each request runs in a process of this Python."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from bitproof.harness.errors import BitproofError, MachineError, RecordingError, UsageError
from bitproof.harness.files.plain_files import UNPACKED, read_plain
from bitproof.harness.processes.command import CommandError, Ran, run_command
from bitproof.harness.runtime.disk_cache import default_folder

START = Path(__file__).parent / "standalone" / "answer_request.py"
INSTALL_SECONDS = 1800.0
_REQUIREMENT = re.compile(r"([A-Za-z0-9][\w.-]*?)[<>=!~]=?[\w.+*,<>=!~]+")


@dataclass(frozen=True, kw_only=True)
class Environment:
    """A Python interpreter, and environment variables that its processes have in addition to those of this process."""

    python: str = sys.executable
    variables: Mapping[str, str] = field(default_factory=dict)
    package: str = ""
    """Package whose release is a fact of this environment; "" for none. torch's release is always a fact."""

    @property
    def threads(self) -> int | None:
        """The number of threads that OMP_NUM_THREADS requests in this environment; None if it is not set.

        With None, each call is replayed with the number of threads that was recorded.
        """
        asked = self.variables.get("OMP_NUM_THREADS", "")
        return int(asked) if asked.isdigit() and int(asked) else None

    def ask(self, what: str, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Run `standalone/answer_request.py` in this environment, and return its answer.

        `what` is the kind of request, such as "replay", and `request` has its arguments. Raises:

        - UsageError for a program that cannot run.
        - MachineError for a Python without torch.
        - RecordingError if the archive is refused, or if the process fails.
        """
        with tempfile.TemporaryDirectory(prefix="bitproof-moved-") as folder:
            asked, answered = Path(folder, "request.json"), Path(folder, "answer.json")
            asked.write_text(json.dumps(request))
            words = [str(START), what, str(asked), str(answered)]
            # The program must iterate its sets in the same order in both environments.
            done = self._run(words, {"PYTHONHASHSEED": "0", **self.variables}, seconds)
            # A program may end its process with status 0 before the answer is written.
            if done.status == 0 and answered.is_file():
                return answer_or_refusal(json.loads(read_plain(answered, UNPACKED * 16)), what, self.python)
            raise _failure(what, self.python, done.status, done.out)

    def bitproof(self, words: Sequence[str], variables: Mapping[str, str], seconds: float) -> None:
        """Run a command of bitproof in this environment.

        `words` are the words of the command line, and `variables` are further environment variables. Raises
        MachineError if bitproof is not installed there, UsageError if the command line is wrong, and RecordingError if
        the command fails.
        """
        done = self._run(["-m", "bitproof", *words], {**self.variables, **variables}, seconds)
        if done.status == 0:
            return
        if "No module named bitproof" in done.out:
            raise MachineError(
                "a case runs by bitproof, which this Python has not", expected="the same bitproof", found=self.python
            )
        last = "\n".join(done.out.strip().splitlines()[-8:])
        # Status 2 means that the command line is wrong.
        raise (UsageError if done.status == 2 else RecordingError)("the case cannot be recorded", found=last)

    def _run(self, words: Sequence[str], variables: Mapping[str, str], seconds: float) -> Ran:
        try:
            # In this order, so that the environment's own variables win.
            given = {**os.environ, **variables}
            return run_command([self.python, *words], seconds, environment=given, is_joined=True)
        except CommandError as error:
            raise MachineError(f"{self.python} does not answer: {error}", fix="choose another --python") from error


def answer_or_refusal(found: dict[str, Any], what: str = "", python: str | None = None) -> dict[str, Any]:
    """Return the answer `found`. If it has the key "error", raise the error that it describes.

    The error's text names `what` (the kind of request) and `python` (the Python that answered).
    """
    if "error" not in found:
        return found
    if found["kind"] == "FailedProgramError":
        title = "the calls cannot be replayed" if what == "replay" else f"the program failed ({what})"
        raise RecordingError(title, found=str(found["error"]), where=python)
    if found["kind"] == "ProgramError":
        raise UsageError(str(found["error"]), expected="FILE.py, or FILE.py:FUNCTION")
    raise RecordingError(
        "the archive of calls is refused; nothing in it was run",
        found=str(found["error"]),
        fix="record it again: bitproof moved record DIR PROGRAM",
    )


def _failure(what: str, python: str, status: int, printed: str) -> BitproofError:
    last = "\n".join(printed.strip().splitlines()[-8:])
    if "No module named 'torch'" in printed:
        return MachineError("the Python has no torch", expected="an interpreter that imports torch", found=python)
    # A negative status is the signal that ended the process.
    if status < 0:
        name = signal.Signals(-status).name if -status in [*signal.Signals] else str(-status)
        return RecordingError(f"the process that should {what} was ended by {name}", found=last or None, where=python)
    return RecordingError(f"the program failed ({what})", found=last or f"exit status {status}", where=python)


def installed(requirement: str) -> str:
    """Return the path of a Python that has a package such as `torch==2.15.0`, and all other packages of this Python.

    An environment with this Python is created on first use. Raises UsageError if `requirement` is not a package with a
    release, and MachineError if the installation fails.
    """
    if not (named := _REQUIREMENT.fullmatch(requirement)):
        raise UsageError("--to takes a package and its release", expected="torch==2.15.0", found=requirement)
    cache = default_folder()
    if cache is None:
        raise UsageError("there is no folder for the new environment", fix="set BITPROOF_CACHE")
    # The name of the folder depends on all that decides its content: the requirement, this Python, and its packages'
    # folder.
    rest = sysconfig.get_path("purelib")
    folder = cache / "environments" / sha256(f"{requirement} {sys.version} {rest}".encode()).hexdigest()[:16]
    python = folder / "bin" / "python"
    if not (folder / "ready").is_file():
        # With `--clear`, since an interrupted installation may have left files.
        _run_install(requirement, [sys.executable, "-m", "venv", "--clear", str(folder)])
        # Everything else is this Python's, so that a script finds its packages, and a case bitproof. pip is not shown
        # this Python's torch if it shall install another one: it would take it for the environment's own.
        (own,) = folder.glob("lib/python*/site-packages")
        shared, text = own / "shared.pth", f"import site; site.addsitedir({rest!r})\n"
        # For another package pip sees this Python's packages, and installs only dependencies that are missing. torch
        # comes with all libraries that it needs, such as CUDA's.
        if named[1].lower() != "torch":
            shared.write_text(text)
        _run_install(requirement, [str(python), "-m", "pip", "install", "--quiet", requirement])
        shared.write_text(text)
        # Last, so that an interrupted installation is not taken for a complete one.
        (folder / "ready").touch()
    return str(python)


def package_of(requirement: str) -> str:
    """Return the package that a requirement names, such as `transformers`.

    Returns "" for torch, because the facts about an environment always include torch's release.
    """
    named = _REQUIREMENT.fullmatch(requirement)
    return "" if named is None or named[1].lower() == "torch" else named[1]


def _run_install(requirement: str, command: Sequence[str]) -> None:
    try:
        done = run_command(command, INSTALL_SECONDS, is_joined=True)
    except CommandError as error:
        raise MachineError(f"{requirement} cannot be installed: {error}") from error
    if done.status != 0:
        last = "\n".join(done.out.strip().splitlines()[-4:])
        raise MachineError(f"{requirement} cannot be installed", found=last, fix="use --python PATH")
