"""Entry points of installed distributions."""

from __future__ import annotations

import pytest

from bitproof.harness.errors import UsageError
from bitproof.harness.user_code import plugins
from tests.distributions import install


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_entry_points_are_found_by_group_and_name_without_loading_them(site):
    install(
        site, "mine", "[bitproof.systems]\nloop = no_such_module:make\n[bitproof.cases]\nfew = no_such_module:CASES\n"
    )
    entry = plugins.entry_points(plugins.SYSTEMS)["loop"]
    assert plugins.describe(entry) == "no_such_module:make of mine 1.0"
    assert "few" in plugins.entry_points(plugins.CASES)


def test_a_name_that_two_distributions_claim_is_refused_naming_both(site):
    install(site, "mine", "[bitproof.systems]\nloop = mine:make\n")
    install(site, "theirs", "[bitproof.systems]\nloop = theirs:make\n")
    with pytest.raises(UsageError) as error:
        plugins.entry_points(plugins.SYSTEMS)
    first, second = ("mine", "theirs") if "mine:make of mine 1.0 and" in str(error.value) else ("theirs", "mine")
    assert str(error.value) == (
        "UsageError: two distributions claim the name loop in entry-point group bitproof.systems\n"
        "  expected: a name of its own for every entry point\n"
        f"  found: {first}:make of {first} 1.0 and {second}:make of {second} 1.0\n"
        "  fix: uninstall one of the two, or rename its entry point"
    )


def test_whatever_a_broken_entry_point_raises_names_its_distribution(site):
    install(site, "mine", "[bitproof.systems]\nloop = broken_plugin:make\n")
    (site / "broken_plugin.py").write_text("1 / 0\n")
    with pytest.raises(UsageError) as error:
        plugins.load(plugins.entry_points(plugins.SYSTEMS)["loop"])
    assert str(error.value) == (
        "UsageError: entry point loop of mine 1.0 cannot be loaded\n"
        "  found: ZeroDivisionError: division by zero\n"
        "  came from: bitproof.systems, broken_plugin:make\n"
        "  fix: mend or uninstall that distribution"
    )
