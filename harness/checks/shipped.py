"""List the available checks: bitproof's own checks, checks of installed packages, and classes in a user's file.

The module of one of bitproof's checks is imported only if the user sets one of its options.
"""

from __future__ import annotations

import functools
import importlib
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from bitproof.harness.checks.check import Check
from bitproof.harness.errors import UsageError
from bitproof.harness.settings import from_options, options_of
from bitproof.harness.user_code import plugins
from bitproof.harness.user_code.user_file import run_file

SHIPPED = {
    "baseline": "bitproof.harness.powers.baselines.check:BaselineCheck",
    "proof": "bitproof.harness.powers.proofs.check:ProofCheck",
    "sensitivity": "bitproof.harness.powers.sensitivity.check:SensitivityCheck",
}
"""Each shipped check by name, in the order in which they run."""

EXPECTED = "FILE.py:CLASS or MODULE:CLASS, a subclass of bitproof.Check with a `name` and a `judge`"


@functools.cache
def shipped(name: str) -> type[Check]:
    return _imported(SHIPPED[name])


def shipped_checks() -> tuple[type[Check], ...]:
    return tuple(map(shipped, SHIPPED))


def all_checks(asked: Sequence[str | type[Check]] = ()) -> tuple[type[Check], ...]:
    """Return all check classes: first bitproof's own, then those of installed packages, then those in `asked`.

    `asked` has the classes that the user requests, or texts as for `--check`. Raises UsageError if a check cannot be
    loaded, or if two have the same name.
    """
    found: dict[str, type[Check]] = {}
    for source, check in _named_checks(asked):
        # A class given twice is the same object, since `load` caches.
        if (other := found.setdefault(check.name, check)) is not check:
            raise UsageError(
                f"two checks are named {check.name!r}",
                found=f"{other.__module__}.{other.__name__} and {source}",
                fix="rename one of them, or leave out --check if the two are the same check",
            )
    return tuple(found.values())


def _named_checks(asked: Sequence[str | type[Check]]) -> Iterator[tuple[str, type[Check]]]:
    for name, source in SHIPPED.items():
        # Packages' checks come after bitproof's own, so an error about two equal names blames the package.
        yield source, shipped(name)
    for point in plugins.entry_points(plugins.CHECKS).values():
        source = f"{plugins.describe(point)}, an installed package"
        yield source, checked(plugins.load(point), source)
    for each in asked:
        yield str(each), load(each) if isinstance(each, str) else checked(each, repr(each))


@functools.cache
def load(source: str) -> type[Check]:
    """Load the check `FILE.py:CLASS` or `MODULE:CLASS`. Raises UsageError if there is none."""
    try:
        return checked(_imported(source), source)
    except UsageError:
        raise
    except Exception as error:
        # The last frame is the line in the user's file, or in code that it calls.
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise UsageError(
            f"check {source} cannot be loaded",
            expected=EXPECTED,
            found=f"{type(error).__name__}: {error}",
            where=f"{last.filename}:{last.lineno}",
        ) from error


def _imported(source: str) -> Any:
    file, colon, name = source.rpartition(":")
    if not colon:
        raise UsageError(f"check {source!r} names no class", expected=EXPECTED)
    if file.endswith(".py"):
        if not Path(file).is_file():
            raise UsageError(f"the file of check {name} does not exist", expected=EXPECTED, found=file)
        module, _ = run_file(Path(file))
    else:
        module = importlib.import_module(file)
    if not hasattr(module, name):
        # The classes of the file itself, for a mistyped name; it usually imports `Check`, too.
        classes = [each for each, value in vars(module).items() if isinstance(value, type) and issubclass(value, Check)]
        own = ", ".join(each for each in classes if each != "Check") or "no check"
        raise UsageError(f"{file} has no class {name}", expected=EXPECTED, found=own)
    return getattr(module, name)


def checked(found: Any, source: str) -> type[Check]:
    """Return `found` if it is a complete check class; otherwise raise UsageError, which names `source`."""
    # In this order, since each question relies on the answers before it.
    problem = ""
    if not (isinstance(found, type) and issubclass(found, Check)):
        problem = f"{found!r} is no subclass of bitproof.Check"
    elif not isinstance(getattr(found, "name", None), str) or not found.name.isidentifier():
        name = getattr(found, "name", None)
        problem = f"{found.__name__} has no name" if name is None else f"its name {name!r} is no Python identifier"
    elif found.judge is Check.judge:
        problem = f"{found.__name__} does not define judge(self, evidence)"
    elif not is_dataclass(found.Options):
        problem = f"{found.__name__}.Options is no dataclass"
    elif own := [each.name for each in fields(found.Options) if "setting" not in each.metadata]:
        problem = f"field {own[0]} of {found.__name__}.Options is no bitproof.setting(...)"
    if problem:
        raise UsageError(f"{source} is not a check", expected=EXPECTED, found=problem)
    # Only now: the options can be read when they are known to be a dataclass of settings.
    refuse_taken_options([found])
    return found


def active(checks: Sequence[type[Check]], given: Mapping[str, Any]) -> tuple[Check, ...]:
    """Return the checks that the given options switch on. `given` maps the options' keywords to values."""
    found = [check.of(from_options(check.Options, given)) for check in checks]
    return tuple(check for check in found if check is not None)


def refuse_taken_options(checks: Sequence[type[Check]]) -> None:
    """Raise UsageError if an option of these checks has the name of an option for runs or cases."""
    from bitproof.harness.changes import Changes
    from bitproof.harness.options import RunOptions

    # An option has words on the command line and a keyword in Python, and neither may clash.
    taken = {
        name for part in (Changes, RunOptions) for each in options_of(part) for name in (*each.names, each.keyword)
    }
    for check in checks:
        for each in options_of(check.Options):
            if clash := taken & {*each.names, each.keyword}:
                raise UsageError(
                    f"check {check.name} has an option that exists already", found=min(clash), fix="rename the option"
                )
