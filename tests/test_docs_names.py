"""Every file name, path and option that a page mentions is one of the program, of the tree, or of another program."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from typer.main import get_command

from bitproof.harness.cli.app import app
from bitproof.harness.cli.command_table import load_commands

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), ROOT / "reports" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [page for page in PAGES if page.name != "CHANGELOG.md"]  # it describes earlier releases

_SUFFIXES = "conf|html|jsonl?|lock|log|md|parquet|pt2|py|safetensors|sarif|sbatch|sh|sqlite|svg|toml|txt|xml|ya?ml"
_FILE = re.compile(
    rf"(?<![\w.*<>{{}}/-])(?:[\w.-]+/)*[\w-][\w-]*(?:\.[\w-]+)*?\.(?:{_SUFFIXES})(?:\.[a-z_]+)*(?![\w(.*-])"
)
_OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
_PATH = re.compile(r"(?<!`)`([a-z_.][\w.-]*(?:/[\w.-]+)+)/?`(?!`)")
_CALL = re.compile(r"(?<!\bfrom)(?:^|[ $`])bitproof +([a-z-]+)(.*)")

EXAMPLES = {
    *(
        "A.pt2",
        "B.pt2",
        "FILE.json",
        "FILE.py",
        "a.py",
        "b.py",
        "change.py",
        "check.py",
        "mine.py",
        "pass.py",
        "passes.py",
    ),
    *(
        "t.py",
        "train.py",
        "train_positions.py",
        "my_pass.py",
        "my_passes.py",
        "my_loop.py",
        "my_trainer.py",
        "loop.py",
        "makemore.py",
        "CASE.json",
        "costs.json",
        "sitecustomize.py",
        "mine.json",
        "names.json",
        "plan.json",
        "case.json",
    ),
}
"""Files of a reader, as pages call them, and `sitecustomize.py`, which is Python's."""
GENERATED = re.compile(
    r"(?:.*/)?(?:\d+\.log|rank(?:N|\d+)\.log|host\d*\.log|(?:moe_seq|moe_batch)\.json|\d{3}-\w+(?:\.\w+)*\.(?:txt|diff|json))"
)
"""Files whose names a run derives from a rank, a case or a pass."""
FOLDERS = re.compile(
    r"(?:reports|out|shrunk|graphs|logs|profile|recordings|values|baselines|main|change|s\d|merged|faults|steps)(?:/.*)?"
)
"""Where commands write; `reports/latest/report.json` is checked by the file's name."""
OTHERS = {
    *("--config-settings", "--cpus-per-task", "--gpus-per-node", "--gpus-per-task", "--index-url", "--job-name"),
    *("--kill-on-bad-exit", "--nodes", "--ntasks-per-node", "--nnodes", "--nproc-per-node", "--node-rank", "--rdzv-id"),
    *("--rdzv-backend", "--rdzv-endpoint", "--standalone", "--master-addr", "--master-port"),
}
"""Options of pip, sbatch, srun and torchrun."""
CHECKS = {"--memory-growth"}
"""Options of the check that a how-to writes."""


@cache
def tracked() -> list[str]:
    """The files under version control, with those that are new."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()


@cache
def source(*, with_tests: bool) -> str:
    """The text of the program, where the names of the files that it writes stand."""
    tops = ("bitproof/", "harness/", "reference/", "cases/", ".ci/", ".github/", "action.yml", "Makefile", "pyproject")
    tops += ("tests/",) if with_tests else ()
    files = [ROOT / name for name in tracked() if name.startswith(tops) and name != "tests/test_docs_names.py"]
    return "\n".join(file.read_text(errors="replace") for file in files if file.is_file())


@cache
def places() -> set[str]:
    """Every way to name a file or folder of the tree by its last components, with or without a suffix."""
    found = set()
    for name in tracked():
        full = Path(name).parts
        for parts in (full, (*full[:-1], full[-1].rpartition(".")[0] or full[-1])):
            found |= {"/".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1)}
    return found


@cache
def options() -> dict[str, set[str]]:
    """Each command's options."""
    load_commands([])
    program = get_command(app)
    commands = {"": program, **program.commands}  # type: ignore[attr-defined]
    return {
        name: {"--help"} | {each for param in command.params for each in (*param.opts, *param.secondary_opts)}
        for name, command in commands.items()
    }


def code_of(text: str) -> Iterator[str]:
    """The lines of a page's blocks, and what stands between backticks in its other text."""
    for block in re.findall(r"^```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield from re.sub(r"\\\n", " ", block).splitlines()
    yield from re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))


def is_known_file(name: str, saved: set[str]) -> bool:
    """Whether the tree has this file, the program writes it, the page has its reader save it, or it is an example."""
    base = name.rpartition("/")[2]
    if base in EXAMPLES or "/shrunk/" in name or base in saved or GENERATED.fullmatch(name):
        return True
    return (
        base in places() or re.search(rf"(?<![\w.-]){re.escape(base)}(?![\w.])", source(with_tests=False)) is not None
    )


def is_known_option(option: str) -> bool:
    """Whether a command of ours has it, a script of the tree, or another program that pages show."""
    if option in OTHERS | CHECKS or any(option in each for each in options().values()):
        return True
    return re.search(rf"[\"' ]{option}[\"' =:]", source(with_tests=True)) is not None


def wrong_names(text: str) -> list[str]:
    """The file names, paths and options in a page's code that neither the program nor the tree has."""
    saved = set(re.findall(r"<!-- file: (\S+) -->", text))
    wrong = []
    for code in code_of(text):
        code = re.sub(r"\$\{\{.*?\}\}", "", code)  # an expression of GitHub Actions
        wrong += [name for name in _FILE.findall(code) if not is_known_file(name, saved)]
        wrong += [option for option in _OPTION.findall(code) if not is_known_option(option)]
        for command, rest in _CALL.findall(code):
            known = options().get(command)
            if known is None and re.search(rf"bitproof +{command}\b", code) and command[0] != "-":
                wrong.append(f"bitproof {command}")
            ours = re.split(r" -- | \| |  ", rest)[0]  # up to another program, or what a summary says of the command
            ours = re.sub(r"-args=\S+", "-args", ours)  # of the script that is run
            unknown = [each for each in _OPTION.findall(ours) if known and each not in {*known, *CHECKS}]
            wrong += [f"bitproof {command} {each}" for each in unknown]
    for path in _PATH.findall(re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)):
        if path not in places() and not FOLDERS.fullmatch(path) and not (ROOT / path).exists():
            wrong.append(path)
    return sorted(set(wrong))


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_a_page_mentions_no_file_path_or_option_that_does_not_exist(page: Path) -> None:
    assert wrong_names(page.read_text()) == []


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("`report.ci.sarif` and `report.sarif`", ["report.ci.sarif"]),
        ("`report.html.document` and `report.html`", ["report.html.document"]),
        ("`reports/latest/report.jsn` or `reports/latest/raport.json`", ["reports/latest/raport.json"]),
        ("`harness/execute/lunch` and `execute/launch`", ["harness/execute/lunch"]),
        ("`run --chunk-module x`, `--chunk-modules x`", ["--chunk-module"]),
        ("```\n$ bitproof report x --world-size 2\n```", ["bitproof report --world-size"]),
        ("```\n$ bitproof run --world-size 2\n```", []),
        ("```\n$ bitproof history add x\n```", ["bitproof history"]),
        ("<!-- file: own_name.py -->\n```\nbitproof run own_name.py\n```", []),
        ("`no_such_script.sh`", ["no_such_script.sh"]),
    ],
)
def test_a_wrong_name_on_a_page_is_found(text: str, wrong: list[str]) -> None:
    assert wrong_names(text) == wrong
