"""Translate a system's names of tensors to the reference's names, by rules that the user gives. Loads no torch.

Example: {"model.embed.weight": "tok_embeddings.weight", "model.*": "*"}.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bitproof.harness.errors import UsageError
from bitproof.harness.files.plain_files import read_plain

EXAMPLE = '{"model.embed.weight": "tok_embeddings.weight", "model.*": "*"}'


class Names:
    """Translates a system's names of tensors to the reference's names, by rules {system's name: reference's name}.

    - A `*` in a system's name matches any text, as short as possible. A `*` in the reference's name stands for that
      text: the rule {"model.*": "*"} translates `model.embed` to `embed`.
    - A rule without `*` takes precedence. Among rules with `*`, the first that matches is used.
    - `unused`: the rules that have translated no name so far.

    Raises UsageError for rules that contradict each other. `declared_by` states where the rules are, for the error.
    """

    def __init__(self, rules: Mapping[str, str], declared_by: str) -> None:
        self.rules = _checked(rules, declared_by)
        self.unused = dict.fromkeys(self.rules)
        self._patterns = {own: _pattern(own) for own in self.rules if "*" in own}

    def translate(self, name: str) -> str:
        """Return the reference's name for a system's name of a tensor; without a matching rule, the same name."""
        if name in self.rules and name not in self._patterns:
            self.unused.pop(name, None)
            return self.rules[name]
        for own, pattern in self._patterns.items():
            if match := pattern.fullmatch(name):
                self.unused.pop(own, None)
                # The `*` of the second name are replaced in order, by what those of the first have matched.
                texts = iter(match.groups())
                return re.sub(r"\*", lambda _, texts=texts: next(texts), self.rules[own])  # type: ignore[misc]
        return name


class NamesInFile(dict[str, str]):
    """Rules for names that were read from a JSON file. `file` is its path, for replay commands."""

    file: Path


def names_of(given: Mapping[str, str] | str | Path | None) -> Mapping[str, str]:
    """Return the rules for names that a caller gave as a mapping, or as the path of a JSON file; {} for None.

    Raises UsageError if the file cannot be read, or its rules are invalid.
    """
    if given is None or isinstance(given, Mapping):
        return given or {}
    found = NamesInFile(read_names(Path(given)))
    found.file = Path(given)
    return found


def read_names(path: Path) -> dict[str, str]:
    try:
        # JSON allows a name twice, and Python would keep the last silently.
        values = json.loads(read_plain(path), object_pairs_hook=_refuse_twice)
    except OSError as error:
        raise UsageError(
            "the file of names cannot be read", expected="a JSON file", found=f"{path}: {error.strerror or error}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise UsageError("the file of names is not JSON", found=str(error), where=str(path)) from error
    return _checked(values, str(path))


def _refuse_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        twice = next(name for name in values if sum(name == other for other, _ in pairs) > 1)
        raise ValueError(f"it maps {twice!r} twice")
    return values


def _checked(rules: Any, declared_by: str) -> dict[str, str]:
    if not isinstance(rules, Mapping):
        raise UsageError(
            "names are declared as a mapping", expected=EXAMPLE, found=type(rules).__name__, where=declared_by
        )
    targets: dict[str, str] = {}
    for own, name in rules.items():
        if not (isinstance(own, str) and isinstance(name, str) and own and name and own.count("*") == name.count("*")):
            raise UsageError(
                f"the rule for name {own!r} is no rule",
                expected="two texts with the same number of *, such as " + EXAMPLE,
                found=repr(name),
                where=declared_by,
            )
        # Two patterns with the same target may match different names, so only fixed names are compared here.
        if "*" not in name and name in targets:
            raise UsageError(
                f"two names are mapped to {name!r}",
                expected="a name of its own for every tensor",
                found=f"{targets[name]!r} and {own!r}",
                where=declared_by,
            )
        targets[name] = own
    return dict(rules)


def _pattern(own: str) -> re.Pattern[str]:
    """Return a regular expression for a system's name in a rule. Each `*` matches the shortest possible text."""
    # Atomic groups never backtrack: a longer match could not help the rest, and with 25 `*` it would take forever.
    first, *words, last = map(re.escape, own.split("*"))
    between = "".join(f"(?>(.*?){word})" for word in words)
    return re.compile(f"{first}{between}(.*?){last}", re.DOTALL)
