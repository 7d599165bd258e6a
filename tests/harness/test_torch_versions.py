from __future__ import annotations

import re
import tomllib
from pathlib import Path

from bitproof.harness.torch_versions import NEWEST, OLDEST, SUPPORTED, TESTED, is_supported, is_tested

ROOT = Path(__file__).parent.parent.parent


def test_the_range_is_that_of_the_package():
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"torch>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}" in dependencies
    assert SUPPORTED == "2.11 to 2.15"


def test_the_ends_of_the_range_and_the_pinned_release_are_tested():
    minors = [tuple(map(int, version.split(".")[:2])) for version in TESTED]
    assert (minors[0], minors[-1]) == (OLDEST, NEWEST)
    pinned = re.search(r"^torch==([\d.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned and pinned[1] in TESTED


def test_a_build_is_its_release():
    assert is_tested("2.13.0+cpu") and is_tested("2.13.0")
    assert not is_tested("2.13.1") and not is_tested("2.13.0a0+git12")


def test_what_is_no_version_is_not_supported():
    assert is_supported("2.11.0") and is_supported("2.15.7+cu132")
    assert not any(map(is_supported, ("2.10.2", "2.16.0a0", "3.0.0", "dev", "")))
