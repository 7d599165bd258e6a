"""One test for all cases, with the case's name as its parameter: `pytest cases -k moe_seq -n 2`."""

from __future__ import annotations

import pytest

from bitproof.builtin_cases import all_cases
from bitproof.harness.case import Case
from bitproof.harness.case.select import asks_for
from bitproof.harness.compare.outcome import complete
from bitproof.harness.machine.devices import unmet_requirement
from bitproof.harness.options import RunOptions
from bitproof.harness.records import Report
from bitproof.harness.report import markdown
from bitproof.harness.report.status import exit_status
from bitproof.harness.report.write import prepare_run_dir, write_run


@pytest.mark.ranks
@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
def test_case_gets_its_expected_verdict(case: Case, pytestconfig: pytest.Config) -> None:
    """Run the case as `bitproof run` does. A case that needs a GPU is skipped on a machine without one, unless -k is
    given."""
    from bitproof.harness.execute import launch

    options = RunOptions()
    reason = unmet_requirement(case, options.device)
    if reason and not asks_for(pytestconfig.getoption("keyword")):
        pytest.skip(f"NOT RUN: {reason}")
    run_dir = prepare_run_dir(pytestconfig.rootpath / "reports")
    environment = launch.environment(options.device)
    found = list(launch.run_cases([case], options, run_dir, lambda event: None))
    results = complete([case], found, "the launcher gave no result for this case")
    report = Report(run_id=run_dir.name, exit_status=exit_status(results), environment=environment, cases=results)
    write_run(report, run_dir)
    if not all(result.as_expected for result in results):
        pytest.fail(markdown.render(report), pytrace=False)
