"""Runs a GitHub workflow's jobs on this machine: shell steps for real, and the few actions that move files.

Knows the expressions that nightly.yml uses and no others: an unknown one is an error.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

SHELL = ["bash", "--noprofile", "--norc", "-eo", "pipefail"]  # what `shell: bash` stands for


def read_workflow(path: Path) -> dict[str, Any]:
    """A workflow as plain values. YAML 1.1 takes the key `on` for true."""
    return yaml.safe_load(path.read_text())


@dataclass
class Runner:
    """A machine's work. `artifacts` and `cache` are what outlives a job; `env` goes to every step.

    `results` has how each step of the last job ended, `jobs` the status of every job, by name.
    """

    workflow: dict[str, Any]
    folder: Path
    env: dict[str, str]
    skipped: tuple[str, ...] = ()
    results: dict[str, str] = field(default_factory=dict)
    jobs: dict[str, int] = field(default_factory=dict)
    output: str = ""

    def run(self, run_id: str = "1") -> int:
        """All jobs in order, a matrix's one after another; the exit status of the last job's first failing step."""
        shutil.rmtree(self.folder / "artifacts", ignore_errors=True)
        common = {"github.run_id": run_id, "github.run_attempt": "1"}
        for name, job in self.workflow["jobs"].items():
            matrix = job["strategy"]["matrix"] if "strategy" in job else {"only": [1]}
            ((variable, values),) = matrix.items()
            self.jobs[name] = max(
                self.run_job(job, common | {f"matrix.{variable}": str(index), "strategy.job-total": str(len(values))})
                for index in values
            )
        return self.jobs[name]

    def run_job(self, job: dict[str, Any], context: dict[str, str]) -> int:
        """One job; 0, or the exit status of its first failing step."""
        temp, work = self.folder / "temp", self.folder / "work"
        for path in (temp, work):
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir()
        self.results, status = {}, 0
        context = {"inputs.expression": self.env.get("EXPRESSION", "")} | context
        for step in job["steps"]:
            if step.get("name") in self.skipped or not self.is_due(step.get("if"), status, context):
                continue
            code = self.run_step(step, context, temp, work)
            context[f"steps.{step.get('id')}.outcome"] = "success" if code == 0 else "failure"
            self.results[step.get("name", step.get("uses"))] = context[f"steps.{step.get('id')}.outcome"]
            status = status or code
        return status

    def is_due(self, condition: str | None, status: int, context: dict[str, str]) -> bool:
        """Whether a step runs: unless its condition says `always()`, when nothing failed before."""
        parts = [part.strip() for part in condition.split("&&")] if condition else []
        comparisons = [part for part in parts if part != "always()"]
        is_asked = status == 0 or comparisons != parts
        return is_asked and all(self.holds(part, context) for part in comparisons)

    def holds(self, comparison: str, context: dict[str, str]) -> bool:
        """Whether a comparison holds."""
        name, operator, value = re.fullmatch(r"(\S+) (==|!=) '(.*)'", comparison).groups()
        return (context.get(name, "") == value) == (operator == "==")

    def run_step(self, step: dict[str, Any], context: dict[str, str], temp: Path, work: Path) -> int:
        """One step's exit status."""
        if "uses" in step:
            given = {name: self.fill(str(value), context) for name, value in step.get("with", {}).items()}
            return self.use(step["uses"].partition("@")[0], given, work)
        files = {name: temp / name for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY", "GITHUB_PATH")}
        files["GITHUB_STEP_SUMMARY"] = self.folder / "summary.md"
        env = {
            name: self.fill(str(value), context) for name, value in (self.workflow["env"] | step.get("env", {})).items()
        }
        env = (
            os.environ | env | self.env | {name: str(path) for name, path in files.items()} | {"RUNNER_TEMP": str(temp)}
        )
        done = subprocess.run([*SHELL, "-c", step["run"]], cwd=work, env=env, capture_output=True, text=True)
        self.output += done.stdout + done.stderr
        if files["GITHUB_OUTPUT"].exists():
            for line in files["GITHUB_OUTPUT"].read_text().splitlines():
                name, _, value = line.partition("=")
                context[f"steps.{step['id']}.outputs.{name}"] = value
            files["GITHUB_OUTPUT"].unlink()
        return done.returncode

    def fill(self, text: str, context: dict[str, str]) -> str:
        """A text with its expressions' values. What a step did not leave behind is empty."""

        def value(match: re.Match[str]) -> str:
            name = match[1]
            return context.get(name, "") if name.startswith("steps.") else context[name]

        return re.sub(r"\$\{\{ ([\w.-]+) \}\}", value, text)

    def use(self, action: str, given: dict[str, str], work: Path) -> int:
        """An action that moves files, or prepares the machine."""
        artifacts, cache = self.folder / "artifacts", self.folder / "cache"
        match action:
            case "actions/checkout" | "actions/setup-python":
                return 0
            case "actions/upload-artifact":
                shutil.copytree(work / given["path"], artifacts / given["name"])
            case "actions/download-artifact":
                for path in artifacts.glob(given["pattern"]):
                    shutil.copytree(path, work / given["path"] / path.name)
            case "actions/cache/save":
                shutil.copytree(work / given["path"], cache / given["key"])
            case "actions/cache/restore":
                if found := sorted(cache.glob(given["restore-keys"] + "*")):
                    shutil.copytree(found[-1], work / given["path"])
            case _:
                raise ValueError(f"unknown action {action}")
        return 0
