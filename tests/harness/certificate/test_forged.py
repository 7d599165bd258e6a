"""Forged certificates, made by combining rules: see `tests/benchmarks/forge_certificates.py`, which makes many."""

from collections import Counter

from tests.benchmarks.forge_certificates import fuzz_certificates, fuzz_steps, untyped


def test_forged_certificates_are_rejected_and_equal_ones_are_not():
    counts = Counter()
    fuzz_certificates(40, 0, counts)
    assert (counts["certificates rejected"], counts["certificates ACCEPTED"]) == (40, 0)
    assert counts["pairs that are equal, accepted"] > 0
    assert counts["pairs that are equal, by an ill step, rejected"] == 0


def test_without_types_every_forged_certificate_is_accepted():
    """An exact operator of operands of other shapes was, and made one term of two graphs that differ."""
    counts = Counter()
    with untyped():
        fuzz_certificates(20, 0, counts)
    assert (counts["certificates rejected"], counts["certificates ACCEPTED"]) == (0, 20)


def test_a_step_that_is_accepted_means_what_it_says():
    counts = Counter()
    assert fuzz_steps(2000, 0, counts) == []
    assert counts["steps accepted"] > 300


def test_without_types_a_step_that_means_nothing_is_accepted():
    with untyped():
        flaws = fuzz_steps(500, 0, Counter())
    assert any(flaw.startswith("('exact', 'add'") for flaw in flaws)
