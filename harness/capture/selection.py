"""Select the tensors whose values a recording keeps, by shell patterns over `step/kind/name`: `*/grad/layers.1.moe.*`.

`*` also matches slashes: `0/*` selects all tensors of the first step.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Sequence

from bitproof.harness.case import KINDS
from bitproof.harness.errors import UsageError
from bitproof.harness.records import Key

ALL = ("*",)

_MAX_PATTERNS = 100
_MAX_PATTERN = 1000


def parse_values(texts: Sequence[str]) -> tuple[str, ...]:
    """Convert the texts of the option --values to patterns. A text without wildcard and slash is a list of kinds.

    For example, `grad,param` becomes `*/grad/*` and `*/param/*`. Raises UsageError for an unknown kind.
    """
    patterns: list[str] = []
    for text in texts:
        if re.search(r"[/*?\[]", text):
            patterns.append(text)
            continue
        kinds = [kind.strip() for kind in text.split(",")]
        if unknown := [kind for kind in kinds if kind not in KINDS]:
            raise UsageError(
                "--values chooses no tensor",
                expected=f"kinds ({', '.join(KINDS)}), joined by commas, or a pattern over step/kind/name, "
                "such as '*/grad/layers.1.moe.*'",
                found=repr(unknown[0]),
            )
        patterns += [f"*/{kind}/*" for kind in kinds]
    return tuple(dict.fromkeys(patterns))


def first_and_last_step(steps: int) -> tuple[str, ...]:
    return tuple(dict.fromkeys(("0/*", f"{steps - 1}/*")))


def chooser(patterns: Sequence[str]) -> Callable[[Key], bool]:
    """Return a function that takes a tensor's key and returns whether any of the patterns matches the tensor."""
    # `(?!)` matches nothing.
    fits = re.compile("|".join(fnmatch.translate(pattern) for pattern in patterns) or r"(?!)").match
    return lambda key: fits(name_value(key)) is not None


def name_value(key: Key) -> str:
    """Return the name of a tensor's value in patterns and in files of values: `step/kind/name`."""
    return f"{key.step}/{key.kind}/{key.name}"


def are_patterns(patterns: object) -> bool:
    return (
        isinstance(patterns, list)
        and len(patterns) <= _MAX_PATTERNS
        and all(isinstance(pattern, str) and len(pattern) <= _MAX_PATTERN for pattern in patterns)
    )
