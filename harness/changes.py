"""Change settings of every selected case, as a command's options request."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from bitproof.harness.case import Case, Chunking
from bitproof.harness.case.case import are_foreign
from bitproof.harness.case.texts import data_of_file
from bitproof.harness.errors import CaseError, UsageError
from bitproof.harness.settings import CHANGES, option, setting, settings


def check_data(data: str | Path | None) -> str | None:
    """Return `data` in the form of a case's `batch.data`; None without a file.

    Raises UsageError if the file is missing.
    """
    if data is not None and not os.path.isfile(data):
        raise UsageError("there is no such data file", expected="a text file", found=str(data))
    return None if data is None else data_of_file(Path(data))


_DATA = option("--data", CHANGES, "Train on this text instead of the default.", kind=str | Path | None, metavar="FILE")


@dataclass(frozen=True, kw_only=True)
class Changes:
    """Changes to every selected case. None, () and False leave a setting unchanged."""

    candidate: str | None = setting(
        None, "--candidate", CHANGES, "Use this system as the candidate.", metavar="SYSTEM", names_code=True
    )
    reference: str | None = setting(
        None, "--reference", CHANGES, "Use this system as the reference.", metavar="SYSTEM", names_code=True
    )
    steps: int | None = setting(None, "--steps", CHANGES, "Take N training steps.", metavar="N", least=1)
    world_size: int | None = setting(None, "--world-size", CHANGES, "Use N ranks.", metavar="N", least=1)
    data: str | None = settings(
        None,
        _DATA,
        read=lambda data: check_data(data),
        to_options=lambda data: {"data": None if data is None else Path(data)},
    )
    chunk_modules: tuple[str, ...] = setting(
        (),
        "--chunk-modules",
        CHANGES,
        "Chunk these modules instead of the case's own, for example layers.*.moe. Repeatable.",
        metavar="PATTERN",
    )
    chunk_dim: Literal["batch", "seq"] | None = setting(None, "--chunk-dim", CHANGES, "Cut the chunks along this dim.")
    early_grad_accumulation: bool = setting(
        False,
        "--early-grad-accumulation",
        CHANGES,
        "Add both chunks' gradients before their cast and reduction.",
    )
    observe: tuple[str, ...] = setting(
        (),
        "--observe",
        CHANGES,
        "Also record these modules' outputs and gradients: layers.*, or layers.** with submodules. Repeatable.",
        metavar="PATTERN",
    )
    preload: tuple[str, ...] = setting(
        (),
        "--preload",
        CHANGES,
        "Import this module (for example a framework) once, in the process that ranks are forked from. Repeatable.",
        metavar="MODULE",
    )


def change_case(case: Case, changes: Changes) -> Case:
    """Return the case with these changes. Raises CaseError if a change does not fit the case."""
    values: dict[str, Any] = {
        name: value for name in ("reference", "candidate", "steps") if (value := getattr(changes, name)) is not None
    }
    if changes.world_size is not None:
        systems = (values.get("reference", case.reference), values.get("candidate", case.candidate))
        # A user's trainers need not have the case's experts.
        ep = 1 if are_foreign(*systems) and changes.world_size % case.parallelism.ep else case.parallelism.ep
        values["parallelism"] = replace(case.parallelism, world_size=changes.world_size, ep=ep)
    if changes.data is not None:
        values["batch"] = replace(case.batch, data=changes.data)
    for name in ("observe", "preload"):
        if given := getattr(changes, name):
            values[name] = given
    # Before `early_grad_accumulation`, which may apply to chunks that these options define.
    chunking = _changed_chunking(case, changes)
    if changes.early_grad_accumulation:
        if chunking is None:
            raise CaseError(
                f"case {case.name} does not chunk, so it has no gradients to accumulate early",
                expected="cases that chunk",
                found=f"case {case.name} with chunking=None",
                fix="leave it out with -k, or leave out --early-grad-accumulation",
            )
        chunking = replace(chunking, early_grad_accumulation=True)
    return replace(case, **values, chunking=chunking)


def _changed_chunking(case: Case, changes: Changes) -> Chunking | None:
    modules, dim, now = ",".join(changes.chunk_modules), changes.chunk_dim, case.chunking
    if not modules and dim is None:
        return now
    if now is not None:
        # `only` lists single modules of the old pattern, so new modules replace it.
        return replace(now, modules=modules or now.modules, dim=dim or now.dim, only=() if modules else now.only)
    if not modules or dim is None:
        raise CaseError(
            f"case {case.name} does not chunk, so it must be said what to chunk and along which dim",
            expected="both --chunk-modules and --chunk-dim",
            found=f"--chunk-modules {modules}" if modules else f"--chunk-dim {dim}",
            fix=f"add {'--chunk-dim batch or seq' if modules else '--chunk-modules PATTERN'}",
        )
    # Only a case that does not chunk arrives here, with both options given.
    return Chunking(dim=dim, modules=modules)


def named_case(cases: Sequence[Case], name: str, changes: Changes) -> Case:
    """Find the case with exactly this name, and return it with the changes.

    Raises UsageError if there is no such case; the error suggests similar names.
    """
    for case in cases:
        if case.name == name:
            return change_case(case, changes)
    names = [case.name for case in cases]
    close = difflib.get_close_matches(name, names, n=3)
    raise UsageError(
        "no such case",
        expected=" or ".join(close) if close else "a name that `bitproof list` shows, or a JSON file",
        found=name,
        fix=f"did you mean {close[0]}?" if close else None,
    )
