"""The package's declaration, its lock file, and what lints the workflows."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCK = ROOT / "requirements.lock"
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PYTHONS = ("3.11", "3.12", "3.13", "3.14")


def locked(text: str) -> list[tuple[Requirement, int]]:
    """Each requirement of a lock file, and how many hashes it has."""
    entries = re.findall(r"^([^\s#].*?)((?: \\\n    --hash=sha256:[0-9a-f]{64})*)$", text, re.MULTILINE)
    return [(Requirement(name), hashes.count("--hash")) for name, hashes in entries]


def uncovered(wanted: list[str], text: str) -> list[str]:
    """Those of the wanted requirements that a lock file leaves out, or has by another version, on some Python."""
    found = [requirement for requirement, _ in locked(text)]
    missing = []
    for each in map(Requirement, wanted):
        for python in PYTHONS:
            environment = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux"}
            same = [
                one
                for one in found
                if canonicalize_name(one.name) == canonicalize_name(each.name)
                and (one.marker is None or one.marker.evaluate(environment))
            ]
            versions = [str(one.specifier).removeprefix("==") for one in same]
            if len(versions) != 1 or not each.specifier.contains(versions[0], prereleases=True):
                missing.append(f"{each} on {python}: {versions}")
    return missing


def needed() -> list[str]:
    extras = PROJECT["optional-dependencies"]
    return [*PROJECT["dependencies"], *extras["placement"], *extras["test"][1:], "setuptools>=77"]


def test_the_lock_file_has_each_dependency_once_on_every_python_and_by_hash():
    text = LOCK.read_text()
    assert uncovered(needed(), text) == []
    entries = locked(text)
    assert len(entries) > 30 and all(hashes for _, hashes in entries), "pip refuses one without"
    pinned = re.search(r"^torch==\S+", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned and f"\n{pinned[0]} \\\n" in text


def test_a_dependency_that_the_lock_file_lacks_or_has_too_old_is_found():
    text = LOCK.read_text()
    assert uncovered(["another-package"], text) == [f"another-package on {python}: []" for python in PYTHONS]
    assert len(uncovered(["pydantic>=99"], text)) == len(PYTHONS)


def test_the_lock_file_names_no_address_and_no_folder():
    text = LOCK.read_text()
    assert not re.search(r"https?:|file:|index-url|find-links|(?<![\w.])/[a-z]", text)


def test_each_dependency_has_a_row_in_the_documents_table_and_no_other_has():
    page = (ROOT / "docs" / "reference" / "dependencies.md").read_text()
    rows = re.findall(r"^\| ([\w-]+) \| [^|]+ \| [\d.]+ \| [^|]+ \|$", page, re.MULTILINE)
    assert sorted(rows) == sorted(Requirement(each).name for each in PROJECT["dependencies"])


def test_every_supported_python_is_declared_and_nothing_is_replaced_by_a_ceiling():
    declared = {line.rpartition(" ")[2] for line in PROJECT["classifiers"] if "Python :: 3." in line}
    assert declared == set(PYTHONS)
    assert SpecifierSet(PROJECT["requires-python"]).contains("3.14.0")
    assert not any("<" in each or "==" in each for each in PROJECT["dependencies"])


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_fit_githubs_schema(path):
    done = subprocess.run([program("check-jsonschema"), "--builtin-schema", "vendor.github-workflows", str(path)])
    assert done.returncode == 0


def test_the_action_fits_githubs_schema():
    action = [program("check-jsonschema"), "--builtin-schema", "vendor.github-actions", str(ROOT / "action.yml")]
    assert subprocess.run(action).returncode == 0


def test_workflows_and_the_action_pass_a_linter_that_knows_what_is_unsafe_in_them():
    linted = [str(ROOT / ".github"), str(ROOT / "action.yml")]
    done = subprocess.run([program("zizmor"), "--offline", "--no-progress", *linted], capture_output=True)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()


def test_the_linters_see_an_action_that_is_not_pinned_text_in_a_shell_and_a_wrong_key(tmp_path):
    file = tmp_path / ".github" / "workflows" / "w.yml"
    file.parent.mkdir(parents=True)
    steps = '      - uses: actions/checkout@v6\n      - run: echo "${{ github.event.issue.title }}"\n'
    file.write_text(f"on: issues\njobs:\n  a:\n    runs-on: ubuntu-latest\n    steps:\n{steps}")
    done = subprocess.run([program("zizmor"), "--offline", str(file)], capture_output=True, text=True)
    assert done.returncode != 0 and "unpinned-uses" in done.stdout and "template-injection" in done.stdout
    file.write_text(file.read_text().replace("runs-on", "runs-at"))
    schema = [program("check-jsonschema"), "--builtin-schema", "vendor.github-workflows", str(file)]
    assert subprocess.run(schema, capture_output=True).returncode == 1


def program(name: str) -> str:
    """A linter, which the extra `test` brings: where it is missing, this fails."""
    found = shutil.which(name, path=str(Path(sys.executable).parent))
    assert found, f"{name} is not installed: pip install -e '.[test]'"
    return found
