"""Describes a shrunk case: lines with the changed settings, and the docstring of the file that reproduces the case."""

from __future__ import annotations

import platform
import pprint
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from bitproof.harness import __version__
from bitproof.harness.case import Case
from bitproof.harness.case.case import file_of
from bitproof.harness.records import CaseResult, Verdict
from bitproof.harness.report.text import blame, locate


def describe_shrinking(changes: Iterable[tuple[str, object, object]], tries: int, seconds: float) -> list[str]:
    rows = [(name, str(was), str(now)) for name, was, now in changes]
    widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    lines = [f"  {name.ljust(widths[0])}  {was.rjust(widths[1])} -> {now}" for name, was, now in rows]
    took = f"{tries} tries, {seconds:.0f} s"
    return [f"shrunk in {took}:", *lines] if rows else [f"nothing could be left out: {took}"]


def reproducer_docstring(case: Case, result: CaseResult, command: str) -> str:
    """Return the docstring of a file that reproduces a shrunk case with only torch.

    The docstring contains `command`, which runs the case.
    """
    from importlib.metadata import version

    return f"""Two training steps that should agree in every bit, and do not: {case.name}, shrunk.

`reference` is a part of {case.reference}, `candidate` the same part of {case.candidate}: what is left of both after all
calls were taken out that do not matter. In the case, {locate(result.first_divergence)} differs first.
{blame(result.first_divergence) or "No single call is to blame."}

Run it: `python FILE` exits with 1 when the two differ, and with 0 when they agree. It needs torch alone.
Written by bitproof {__version__} with torch {version("torch")} and Python {platform.python_version()}.
The case itself: {command}"""


def own_systems_docstring(case: Case, result: CaseResult, command: str, packages: str) -> str:
    """Return the docstring of a file that reproduces a case with a user's two systems and needs these `packages`."""
    return f"""Two systems that should agree in every bit, and do not: {case.name}, shrunk.

`reference` is {case.reference}, `candidate` {case.candidate}. {locate(result.first_divergence)} differs first.
{blame(result.first_divergence) or "No single call is to blame."}

Run it: `python FILE` exits with 1 when the two differ, and with 0 when they agree.
It needs {packages}. Written by bitproof {__version__} with Python {platform.python_version()}.
The case itself: {command}"""


def own_systems_script(
    case: Case,
    result: CaseResult,
    command: str,
    extra_passes: Sequence[str],
    texts: Mapping[str, str],
    names: Mapping[str, str],
    needs: Sequence[str],
) -> str:
    """Return a script that runs a small case with a user's two systems, and exits with 1 if they differ.

    - `command`: command for the script's docstring.
    - `texts`: relative path -> content of the user's files, which the script contains.
    - `names`: system or pass -> its name in these files. A system or pass that is missing here is named by its full
      path.
    - `needs`: packages to install.
    """
    # The script must exit with 1 if the systems differ, so its case expects EQUAL.
    values = replace(case, expected=Verdict.EQUAL.value, differs=()).to_dict()
    named = {side: _source(values[side], names) for side in ("reference", "candidate")}
    passes = ", ".join(_source(text, names) for text in extra_passes)
    shown = pprint.pformat({name: values[name] for name in values if name not in named}, width=110, sort_dicts=False)
    packages = ", ".join(needs) if texts else "bitproof, and what the two systems need"
    head = own_systems_docstring(case, result, command, packages)
    files = "".join(f"    {name!r}: {docstring(text)},\n" for name, text in texts.items())
    return f"""{docstring(head)}

import sys
import tempfile
from pathlib import Path

import bitproof

FILES = {{
{files}}}
CASE = {shown}


def main(folder):
    for name, text in FILES.items():
        path = Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    case = bitproof.Case.from_dict({{**CASE, "reference": {named["reference"]}, "candidate": {named["candidate"]}}})
    run = bitproof.run(case, device={result.device!r}, control="never", extra_passes=[{passes}])
    print(run)
    return run.report.exit_status


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(main(folder))
"""


def _source(text: str, names: Mapping[str, str]) -> str:
    if text in names:
        # An expression of the script: its files are in a folder that is made when it runs.
        return f"folder + {'/' + names[text]!r}"
    source, colon, name = text.rpartition(":")
    file = file_of(source) if colon else None
    return repr(f"{file.resolve()}:{name}" if file else text)


def docstring(text: str) -> str:
    # Backslashes first, since the second replacement adds some.
    escaped = text.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
    return f'"""{escaped}\n"""'
