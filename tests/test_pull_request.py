"""The workflow of pull requests: it runs this project's own checks, and asks for no more than it needs."""

from __future__ import annotations

import re
from pathlib import Path

from tests.test_nightly import STEPS as NIGHTLY_STEPS
from tests.workflow import read_workflow

ROOT = Path(__file__).parents[1]
WORKFLOW = read_workflow(ROOT / ".github" / "workflows" / "pull-request.yml")
STEPS = [step for job in WORKFLOW["jobs"].values() for step in job["steps"]]


def test_each_make_target_exists_and_the_report_becomes_the_summary():
    asked = [step["run"].removeprefix("make ") for step in STEPS if step.get("run", "").startswith("make ")]
    assert asked == ["check", "docs", "run"]
    known = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(asked) <= set(known)
    (summary,) = [step for step in STEPS if "GITHUB_STEP_SUMMARY" in step.get("run", "")]
    assert "reports/latest/report.md" in summary["run"] and summary["if"] == "always()"


def test_it_reads_the_repository_alone_and_runs_code_of_others_without_secrets():
    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert set(WORKFLOW[True]) == {"pull_request", "workflow_dispatch"}, "never pull_request_target"
    assert all("${{" not in step.get("run", "") for step in STEPS)
    assert all(job["timeout-minutes"] > 0 for job in WORKFLOW["jobs"].values())


def test_its_actions_are_those_of_the_nightly_at_the_same_commits():
    used = {step["uses"] for step in STEPS if "uses" in step}
    assert used <= {step["uses"] for step in NIGHTLY_STEPS if "uses" in step}
