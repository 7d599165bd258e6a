"""Patterns over module names: `*` stands for one component, and, in what is observed, `**` for several."""

from __future__ import annotations

import re

from bitproof.harness.errors import CaseError

_CHOSEN = re.compile(r"(\*|\w+)(\.(\*|\w+))*")
_OBSERVED = re.compile(r"(\*\*?|\w+)(\.(\*\*?|\w+))*")


def pattern_of(module: str) -> str:
    """The chunking pattern that a module and its like in other layers match: layers.*.moe of layers.1.moe."""
    return ".".join("*" if part.isdigit() else part for part in module.split("."))


def root_of(pattern: str, module: str) -> str | None:
    """The module matching `pattern` that `module` is, or lies in; else None. `*` stands for one component."""
    wanted, parts = pattern.split("."), module.split(".")[: pattern.count(".") + 1]
    fits = len(parts) == len(wanted) and all(w in ("*", part) for w, part in zip(wanted, parts, strict=True))
    return ".".join(parts) if fits else None


def check_pattern(pattern: str, what: str) -> None:
    """Raise CaseError, which calls it `what`, for a pattern over module names that is none."""
    if not _CHOSEN.fullmatch(pattern):
        raise CaseError(
            f"{what} is a dotted module name",
            expected="components of letters, digits and _, or *, joined by dots, such as layers.*.moe",
            found=repr(pattern),
        )


def is_pattern(text: str) -> bool:
    """Whether a text is a dotted module name with `*` and `**` for components."""
    return _OBSERVED.fullmatch(text) is not None


def fits(pattern: str, module: str) -> bool:
    """Whether a pattern with `*` and `**` is a module's: layers.** fits layers.1.moe, and not layers."""
    parts = {"*": "[^.]+", "**": ".+"}
    return re.fullmatch(r"\.".join(parts.get(part, part) for part in pattern.split(".")), module) is not None
