"""What the documents show: links lead somewhere, commands are ones that exist, and each runs or says why it cannot."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import yaml

from bitproof.builtin_cases import CASES
from bitproof.harness.cli import main
from bitproof.reference.models import build_model
from tests.workflow import Runner

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), ROOT / "reports" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
BLOCK = re.compile(
    r"(?:<!-- (?P<mark>[^>]*) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)


VOLATILE = (
    (r"\d{8}T\d{6}Z-[0-9a-f]{6}", "RUN"),
    (r"\d{4}-\d{2}-\d{2}", "DATE"),
    (r"(?<![\w./-])[\w./-]*/(?=\w+/\w+\.py)", ""),  # where the checkout is
    (r"\.py:\d+", ".py:LINE"),
    (r"-[0-9a-f]{8}\b", "-MACHINE"),
    (r"(?<![\w.])\d+\.\d+(?![\w.])", "SECONDS"),
    (r"[─-]{3,}", "RULE"),
    (r"\s+", " "),
)
"""What another run of a shown command prints otherwise, and what stands for it where the two are compared."""


class Command(NamedTuple):
    """A shown command, and the lines that the page says it prints; `...` for those left out is not among them."""

    words: list[str]
    prints: list[str]


class Block(NamedTuple):
    """A block of a page. `mark` is the comment before: `exits with N`, `needs: ...`, `takes: ...` or `file: NAME`."""

    commands: list[Command]
    mark: str
    text: str

    @property
    def file(self) -> str | None:
        """The name of the file that the page has its reader save, if the block is one."""
        return self.mark.removeprefix("file: ") if self.mark.startswith("file: ") else None

    @property
    def status(self) -> int:
        """What the last command ends with; all others end with 0."""
        found = re.fullmatch(r"exits with (\d)", self.mark)
        return int(found[1]) if found else 0

    @property
    def runs(self) -> bool:
        """Whether a test machine can run it, in seconds."""
        return bool(self.commands) and not self.mark.startswith(("needs: ", "takes: "))


def blocks(page: Path) -> list[Block]:
    """Blocks of a page, with every line that is typed: after a prompt, or a make target by itself."""
    found = []
    for match in BLOCK.finditer(page.read_text()):
        commands: list[Command] = []
        for line in match["text"].splitlines():
            if typed := re.fullmatch(r"\$ (.*)|(make [a-z-]+)", line):
                commands.append(Command(shlex.split(typed[1] or typed[2]), []))
            elif commands and line.strip() not in ("", "..."):
                commands[-1].prints.append(line)
        found.append(Block(commands, match["mark"] or "", match["text"]))
    return found


def not_printed(shown: list[str], printed: str) -> list[str]:
    """Those of the shown lines that are none of what was printed; `...` within a line is whatever is there."""
    lines = "\n".join(settled(line) for line in printed.splitlines())
    patterns = [re.escape(settled(line)).replace(r"\.\.\.", ".*") for line in shown]
    return [line for line, p in zip(shown, patterns, strict=True) if not re.search(f"^{p}$", lines, re.MULTILINE)]


def settled(line: str) -> str:
    """A line without what differs from run to run."""
    for pattern, name in VOLATILE:
        line = re.sub(pattern, name, line)
    return line.strip()


COMMANDS = [command.words for page in PAGES for block in blocks(page) for command in block.commands]
SAVED = {block.file for page in PAGES for block in blocks(page) if block.file}
RUNNABLE = [page for page in PAGES if any(block.runs for block in blocks(page))]


def anchors(text: str) -> set[str]:
    """The anchors that GitHub and the built site give a page's headings: lower case, hyphens, no punctuation."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    plain = (re.sub(r"\]\([^)]*\)", "]", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in plain}


def broken_links(page: Path, text: str) -> list[str]:
    """Links of a page's text that lead to no file of the repository, or to no heading of it."""
    broken = []
    for link, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", text):
        if link.startswith("https://"):
            continue
        target = page.parent / link if link else page
        if not target.exists() or (anchor and anchor not in anchors(text if target == page else target.read_text())):
            broken.append(f"{link}#{anchor}" if anchor else link)
    return broken


def test_every_link_leads_to_a_file_and_every_anchor_to_a_heading():
    assert {page: found for page in PAGES if (found := broken_links(page, page.read_text()))} == {}


def test_a_link_to_a_missing_file_or_heading_is_found():
    text = "# A `b`, c\n[1](README.md) [2](nowhere.md) [3](#a-b-c) [4](#a-b) [5](README.md#nowhere) [6](https://x.org/y#z)\n"
    assert broken_links(ROOT / "README.md", text) == ["nowhere.md", "#a-b", "README.md#nowhere"]


def test_every_path_of_ours_that_is_named_is_there():
    missing = []
    for page in PAGES:
        if page.name == "CHANGELOG.md":
            continue  # tells what was
        for path in re.findall(
            r"`((?:bitproof|harness|reference|cases|tests|docs|\.ci|\.github)/[\w./-]*)`", page.read_text()
        ):
            if not (ROOT / path).exists():
                missing.append(f"{page.relative_to(ROOT)}: {path}")
    assert missing == []


def test_every_page_that_the_code_names_is_there():
    """Docstrings and errors name pages by their path; https addresses of others' documentation are no such path."""
    missing, named = [], 0
    for folder in ("bitproof", "harness", "reference", "cases", "tests", ".ci"):
        for file in (file for file in (ROOT / folder).rglob("*") if file.suffix in (".py", ".jinja", "")):
            if file.is_file() and "__pycache__" not in file.parts:
                for path in re.findall(r"(?<![\w./-])docs/[\w./-]*\.md", file.read_text(errors="replace")):
                    named += 1
                    if not (ROOT / path).exists():
                        missing.append(f"{file.relative_to(ROOT)}: {path}")
    assert named >= 10
    assert missing == []


def test_every_page_is_reached_from_the_readme():
    def linked(page: Path) -> set[Path]:
        links = re.findall(r"\]\(([^)#]+\.md)\)", page.read_text())
        return {(page.parent / link).resolve() for link in links if not link.startswith("https://")}

    seen, todo = set(), {ROOT / "README.md"}
    while todo:
        page = todo.pop()
        seen.add(page)
        todo |= linked(page) - seen
    assert {page for page in PAGES if page.is_relative_to(ROOT / "docs")} <= seen


def test_every_command_that_is_shown_is_one_that_exists(tmp_path, monkeypatch):
    """In a folder with the files that the pages have readers save: a check's file brings options."""
    for block in (block for page in PAGES for block in blocks(page) if block.file):
        (tmp_path / block.file).write_text(block.text)
    monkeypatch.chdir(tmp_path)
    assert len(COMMANDS) > 20
    for command in COMMANDS:
        if command[0] == "make":
            assert set(command[1:]) <= TARGETS, command
        elif command[0] == "python":
            assert command[1:] and all(name in SAVED for name in command[1:]), command
        else:
            assert command[0] == "bitproof"
            assert main([*command[1:], "--help"]) == 0, command


def test_every_summary_of_a_command_names_one():
    _, _, commands = (ROOT / "README.md").read_text().partition("## Commands")
    shown = re.findall(r"^bitproof +([a-z]+) ", commands.split("```")[1], re.MULTILINE)
    assert len(shown) == 16
    for name in shown:
        assert main([name, "--help"]) == 0


def test_the_readmes_figures_are_those_that_a_run_of_its_cases_has():
    """Every rank records at each step a loss, five tensors of each parameter, and a mixture's buffers twice."""
    rows = re.findall(r"^\| (\w+) +\| \*\*EQUAL\*\* .*\| (\d+) +\| 0 ", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert [name for name, _ in rows] == [name for name in CASES if name in dict(rows)] and len(rows) == 6
    for name, compared in rows:
        case = CASES[name]
        with torch.device("meta"):
            model = build_model(case.model)
        num_parameters = len([*model.parameters()])
        records = 1 + 5 * num_parameters + 2 * (len(model.state_dict()) - num_parameters)
        expected = case.steps * case.parallelism.world_size * records
        assert int(compared) > expected if case.observe else int(compared) == expected, name


def test_every_mark_is_one_that_is_known():
    for page in PAGES:
        for mark in (block.mark for block in blocks(page) if block.mark):
            assert re.fullmatch(
                r"exits with [1-3]|needs: .+|takes: .+|file: [a-z_]+\.(py|json|sbatch|sh|yaml)", mark
            ), (page, mark)


def test_only_bitproof_is_imported_in_what_is_shown_of_python():
    for page in PAGES:
        for match in BLOCK.finditer(page.read_text()):
            if match["language"] == "python":
                assert not re.search(r"^\s*(from|import) (harness|reference|cases)\b", match["text"], re.MULTILINE), (
                    page
                )


def test_a_shown_line_is_missing_where_it_differs_in_more_than_time_and_place():
    printed = "a  1.5\nb in /tmp/x/harness/cli.py:17\n\nc of 20261122T192322Z-8c6c23\n"
    printed += "d of many words\n"
    right = ["a 22.1", "d of ... words", "c of 20261001T000000Z-000000", "b in bitproof/harness/cli.py:3"]
    wrong = ["d of ... letters", "a 2", "b in x/harness/list.py:1", "c"]
    assert not_printed(right, printed) == []
    assert not_printed([*wrong, *right], printed) == wrong


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("page", RUNNABLE, ids=[str(page.relative_to(ROOT)) for page in RUNNABLE])
def test_the_commands_of_a_page_run_one_after_the_other(page, tmp_path):
    (tmp_path / "cases").symlink_to(ROOT / "cases")  # the examples are named as from a checkout
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for block in blocks(page):
        if block.file:
            (tmp_path / block.file).write_text(block.text)
        for index, command in enumerate(block.commands if block.runs else ()):
            done = subprocess.run(
                command.words,
                cwd=tmp_path,
                env=os.environ | {"PATH": path},
                capture_output=True,
                text=True,
                timeout=600,
            )
            expected = block.status if index == len(block.commands) - 1 else 0
            said = shlex.join(command.words) + "\n" + done.stdout + done.stderr
            assert done.returncode == expected, said
            assert not_printed(command.prints, done.stdout + done.stderr) == [], said


@pytest.mark.slow
@pytest.mark.ranks
def test_the_workflow_that_the_readme_shows_runs_and_fills_the_summary(tmp_path):
    [shown] = [match for match in BLOCK.finditer((ROOT / "README.md").read_text()) if match["language"] == "yaml"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    runner = Runner({"env": {}} | yaml.safe_load(shown["text"]), tmp_path, {"PATH": path}, skipped=("Install",))
    assert runner.run() == 0, runner.output
    assert "Verdicts: 3 EQUAL." in (tmp_path / "summary.md").read_text()
