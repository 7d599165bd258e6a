"""Match module names with patterns: `*` stands for one component of a name, and `**` for several. `**` is allowed only
in `observe`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from bitproof.harness.errors import CaseError

_CHOSEN = re.compile(r"(\*|\w+)(\.(\*|\w+))*")
_OBSERVED = re.compile(r"(\*\*?|\w+)(\.(\*\*?|\w+))*")


def pattern_of(module: str) -> str:
    """Return the pattern that also matches a module's counterparts in other layers: layers.*.moe for layers.1.moe."""
    return ".".join("*" if part.isdigit() else part for part in module.split("."))


def root_of(patterns: str, module: str) -> str | None:
    """Return the module that matches any of `patterns` and is or contains `module`; None if there is none.

    For example, the pattern layers.*.moe and the module layers.1.moe.router give layers.1.moe. Commas separate
    patterns.
    """
    for pattern in patterns.split(","):
        wanted = pattern.split(".")
        # Only as many components as the pattern has: `module` may be inside the module that matches.
        parts = module.split(".")[: len(wanted)]
        if len(parts) == len(wanted) and _agree(wanted, parts):
            return ".".join(parts)
    return None


def check_patterns(patterns: str, what: str) -> None:
    """Raise CaseError if a pattern is invalid, or if two patterns may match two modules, one inside the other.

    `patterns` are joined by commas. `what` names a pattern in errors.
    """
    each = patterns.split(",")
    for pattern in each:
        check_pattern(pattern, what)
    # In both orders, since either may be the outer pattern, which has fewer components.
    for first, second in itertools.permutations(each, 2):
        if _agree(first.split("."), second.split(".")) and first.count(".") <= second.count("."):
            raise CaseError(
                "chunking patterns choose a module and one inside it, which would be cut twice",
                expected="patterns, none of them within another",
                found=f"{first} and {second}",
                fix="leave out one of them",
            )


def check_pattern(pattern: str, what: str) -> None:
    """Raise CaseError for an invalid pattern over module names. `what` names the pattern in errors."""
    if not _CHOSEN.fullmatch(pattern):
        raise CaseError(
            f"{what} is a dotted module name",
            expected="components of letters, digits and _, or *, joined by dots, such as layers.*.moe",
            found=repr(pattern),
        )


def _agree(first: Sequence[str], second: Sequence[str]) -> bool:
    # A longer pattern is compared by its first components only: its module may be inside the other's.
    return all("*" in (one, other) or one == other for one, other in zip(first, second, strict=False))


def is_pattern(text: str) -> bool:
    """Whether a text is a pattern: a dotted module name whose components may also be `*` or `**`."""
    return _OBSERVED.fullmatch(text) is not None


def fits(pattern: str, module: str) -> bool:
    """Whether a pattern with `*` and `**` matches a module: layers.** matches layers.1.moe, but not layers."""
    parts = {"*": "[^.]+", "**": ".+"}
    # All other components are words of letters, digits and _, so they need no escape.
    return re.fullmatch(r"\.".join(parts.get(part, part) for part in pattern.split(".")), module) is not None
