"""The results that these tests render."""

from tests.harness.report.results import make_baseline, make_report, make_result  # noqa: F401
