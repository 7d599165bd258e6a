from __future__ import annotations

import re
import tomllib
from pathlib import Path

from bitproof.harness.torch_versions import (
    COVERED,
    NEWEST,
    OLDEST,
    SUPPORTED,
    TESTED,
    is_covered,
    is_supported,
    is_tested,
    warning_of,
)

ROOT = Path(__file__).parent.parent.parent


def test_the_package_asks_for_the_oldest_and_has_no_ceiling_that_replaces_a_nightly():
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    [torch] = [each for each in dependencies if each.startswith("torch")]
    assert torch == f"torch>={OLDEST[0]}.{OLDEST[1]}"
    assert (SUPPORTED, COVERED) == ("2.11 or later", "2.11 to 2.15")


def test_the_ends_of_the_range_and_the_pinned_release_are_tested():
    minors = [tuple(map(int, version.split(".")[:2])) for version in TESTED]
    assert (minors[0], minors[-1]) == (OLDEST, NEWEST)
    pinned = re.search(r"^torch==([\d.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned and pinned[1] in TESTED


def test_a_build_is_its_release():
    assert is_tested("2.13.0+cpu") and is_tested("2.13.0")
    assert not is_tested("2.13.1") and not is_tested("2.13.0a0+git12")


def test_what_is_too_old_or_no_version_is_not_supported_and_a_nightly_is_though_not_covered():
    assert all(map(is_supported, ("2.11.0", "2.15.7+cu132", "2.16.0.dev20261101", "3.0.0")))
    assert not any(map(is_supported, ("2.10.2", "1.13", "dev", "")))
    assert is_covered("2.11.0") and is_covered("2.15.7+cu132")
    assert not any(map(is_covered, ("2.10.2", "2.16.0a0", "3.0.0", "dev", "")))


def test_an_untested_version_is_warned_of_and_a_tested_one_or_none_is_not():
    assert warning_of("2.16.0.dev20261101+cpu") == (
        "torch 2.16.0.dev20261101+cpu is not among the tested versions (2.11.0, 2.12.1, 2.13.0, 2.14.1, 2.15.0)"
    )
    assert warning_of("2.13.0+cpu") is None and warning_of(None) is None
