"""The results and reports that these tests render."""

from tests.harness.report.results import localized, make_baseline, make_report, make_result, report  # noqa: F401
