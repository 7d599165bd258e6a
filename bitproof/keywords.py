"""Declare the keywords of `bitproof.run` and similar functions, for type checkers.

Their meanings and defaults are at the fields of the same names in `harness/changes.py` and `harness/options.py`.
`tests/bitproof/test_keywords.py` compares the types.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar

A = TypeVar("A")
B = TypeVar("B")


class _Where(TypedDict, total=False):
    device: Literal["auto", "cpu", "cuda"]
    share_gpus: bool
    collectives: Literal["auto", "shared", "gloo", "native"]
    no_kept_graph: bool


class RecordSettings(_Where, total=False):
    """The keywords of `bitproof.record`."""

    steps: int | None
    world_size: int | None
    data: str | Path | None
    observe: Sequence[str]
    preload: Sequence[str]
    timeout: float
    values: Sequence[str]


class _Chunked(TypedDict, total=False):
    world_size: int | None
    chunk_modules: Sequence[str]
    chunk_dim: Literal["batch", "seq"] | None
    early_grad_accumulation: bool


class _OneCase(_Chunked, total=False):
    steps: int | None
    data: str | Path | None
    preload: Sequence[str]


class _Search(_OneCase, _Where, total=False):
    inject: str | None
    extra_passes: Sequence[str]


class LocalizeSettings(_Search, total=False):
    """The keywords of `bitproof.localize` and of `bitproof.bisect`."""

    verify: bool
    timeout: float
    explain_timeout: float


class ShrinkSettings(_Search, total=False):
    """The keywords of `bitproof.shrink`, in addition to its parameters."""

    jobs: str


class ProveSettings(_Chunked, total=False):
    """The keywords of `bitproof.prove`."""

    extra_passes: Sequence[str]


class SensitivitySettings(_OneCase, total=False):
    """The keywords of `bitproof.sensitivity`, in addition to its parameters."""

    observe: Sequence[str]
    every_call: bool
    no_kept_graph: bool
    timeout: float


class RunSettings(LocalizeSettings, total=False):
    """The keywords of `bitproof.run`."""

    observe: Sequence[str]
    dump_graphs: bool
    precompiled: str | Path | None
    trust_compiled: bool
    control: Literal["always", "when_different", "never"] | None
    stress: bool
    stress_threads: int | None
    names: Mapping[str, str] | str | Path | None
    baseline: bool
    baseline_dir: str | Path | None
    require_baseline: bool
    every_call: bool
    prove_first: bool
    checks: Sequence[str | type[Any]]
    sensitivity: bool
    profile: bool
    verbose: bool


def read_settings(
    name: str,
    taken: type[Any],
    given: Mapping[str, Any],
    first: type[A],
    second: type[B],
    of_checks: Collection[str] = (),
) -> tuple[A, B]:
    """Make instances of the dataclasses `first` and `second` from the keywords of a call.

    `name` is the called function, `taken` the TypedDict of its keywords, and `of_checks` has the keywords of its
    checks, which are not in `given`. Raises TypeError for any other keyword, and UsageError for an invalid value.
    """
    from bitproof.harness.settings import checked, from_options

    known = taken.__optional_keys__ | taken.__required_keys__
    if unknown := sorted(given.keys() - known):
        close = difflib.get_close_matches(unknown[0], {*known, *of_checks}, n=1)
        hint = f": did you mean {close[0]!r}?" if close else ""
        raise TypeError(f"{name}() got an unexpected keyword argument {unknown[0]!r}{hint}")
    return from_options(first, checked(first, given)), from_options(second, checked(second, given))
