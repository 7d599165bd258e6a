"""Options of a run about its graphs: users' passes, and a folder for dumps.

This module imports no torch, so that a wrong command line is refused before anything starts.
"""

from __future__ import annotations

import ast
import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from bitproof.harness.case import COMPILED, TRACED, Case
from bitproof.harness.case.case import file_of
from bitproof.harness.errors import CaseError, UsageError
from bitproof.harness.files.plain_files import read_plain
from bitproof.harness.options import SYNTAX
from bitproof.harness.user_code.user_file import check_signature

PASSES = (
    *("clean_up", "partition", "tag_memory", "offload", "rematerialize", "chunk", "isolate_process_groups"),
    *("isolate_gathers", "bucket", "overlap", "dense_traffic", "concretize_symbols", "measure_memory"),
)
"""The names in the pass list of `graph/pipeline`, in order. A case runs only the passes that its settings need."""

_SYNTAX = re.compile(r"(?P<source>.+):(?P<function>[^\W\d]\w*)(@(?P<side>before|after)=(?P<anchor>\w+))?")


@dataclass(frozen=True, kw_only=True)
class GraphOptions:
    """Options of the command line about graphs.

    - `extra_passes`: users' passes, such as "mine.py:fuse@after=chunk".
    - `dump_dir`: the folder for dumps of the graphs; None for no dumps.
    """

    extra_passes: tuple[str, ...] = ()
    dump_dir: Path | None = None


@dataclass(frozen=True, kw_only=True)
class PassSpec:
    """A user's pass: the function `function` in the file or module `source`.

    It runs before or after (`side`) the pass called `anchor`. By default, it runs after `concretize_symbols`. At this
    point every size is a number, and no backend has compiled the graph yet.
    """

    source: str
    function: str
    side: str
    anchor: str

    @property
    def file(self) -> Path | None:
        """The path of the file that `source` names; None if it names a module."""
        return file_of(self.source)


def parse_pass(text: str) -> PassSpec:
    """Parse the value of `--extra-pass`, such as "mine.py:fuse@after=chunk", which means: run `fuse` of mine.py after
    `chunk`.

    The part from `@` on is optional. Raises UsageError if the value has another form, or if the file cannot be read or
    does not define the function.
    """
    match = _SYNTAX.fullmatch(text)
    if match is None:
        raise UsageError("--extra-pass has a value of the wrong form", expected=SYNTAX, found=repr(text))
    spec = PassSpec(
        source=match["source"],
        function=match["function"],
        side=match["side"] or "after",
        anchor=match["anchor"] or "concretize_symbols",
    )
    if spec.file is not None:
        _check_file(spec.file, spec.function)
    return spec


def check_extra_passes(texts: tuple[str, ...], case: Case) -> None:
    """Refuse users' passes that could not run in a case.

    Raises UsageError for a wrong text or an unknown anchor, and CaseError if the candidate has no graph.
    """
    specs = [parse_pass(text) for text in texts]
    # The anchor of an extra pass may be another extra pass.
    known = [*PASSES, *(spec.function for spec in specs)]
    for spec in specs if case.candidate in TRACED else ():
        if spec.anchor not in known:
            close = difflib.get_close_matches(spec.anchor, known, n=1)
            raise UsageError(
                f"there is no pass {spec.anchor} for {spec.function} to stand {spec.side}",
                expected=", ".join(PASSES),
                found=f"@{spec.side}={spec.anchor}",
                fix=f"did you mean @{spec.side}={close[0]}?" if close else None,
            )
    if texts and case.candidate not in (*TRACED, COMPILED):
        raise CaseError(
            f"the candidate of case {case.name} has no graph for an extra pass",
            expected="the candidate graph, joint, autoplace or compiled: --extra-pass goes into the candidate alone",
            found=f"candidate {case.candidate}",
            fix="leave the case out with -k, or give --candidate graph",
        )


def _check_file(file: Path, function: str) -> None:
    try:
        # Parsed, not run: a wrong command line is refused without running the user's code.
        tree = ast.parse(read_plain(file), str(file))
    except OSError as error:
        raise UsageError(
            "the file of an extra pass cannot be read",
            expected="a Python file",
            found=f"{file}: {error.strerror or error}",
        ) from error
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UsageError("the file of an extra pass is not Python", found=str(error), where=str(file)) from error
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    if function not in names:
        close = difflib.get_close_matches(function, names, n=1)
        raise UsageError(
            f"{file} has no function {function}",
            expected=", ".join(names) or "a function in the file",
            found=function,
            fix=f"did you mean {file}:{close[0]}?" if close else None,
        )
    check_signature(file, function, "an extra pass", (1, 2), "graph, context")
