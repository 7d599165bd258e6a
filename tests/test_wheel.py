"""The wheel, installed into an environment without the source, in folders that an installed command may meet."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

from bitproof.builtin_cases import CASES
from bitproof.harness.case.case_file import case_text
from tests.harness.reports import case as toy
from tests.harness.reports import result, write_report
from tests.small import small
from tests.test_docs import BLOCK, PAGES

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parent.parent
NAMES, LINKS = ("harness", "reference", "cases"), ("harness", "reference", "builtin_cases")
SHORT = ["--world-size", "2", "--steps", "1", "--no-control", "--device", "cpu"]
LOOP = """
from neighbour import NOTHING
from bitproof.builtin_cases.examples.fsdp2_loop import kept_gathered as make

def wait_late_too(module):
    from bitproof.builtin_cases.examples.extra_passes import wait_late
    return wait_late(module)
"""


class Installed(NamedTuple):
    """An environment with the wheel in it."""

    bin: Path
    packages: Path

    def run(self, *command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment in a folder."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        return subprocess.run(
            [self.bin / command[0], *command[1:]],
            cwd=cwd,
            env=inherited | {"GLOO_SOCKET_IFNAME": "lo"} | environment,
            capture_output=True,
            text=True,
            timeout=300,
        )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a build leaves files beside what it builds, and would take in what an older one left
    for name in ("bitproof", *NAMES):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [wheel] = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(wheel)], check=True)
    [packages] = folder.glob("lib/python*/site-packages")
    # What the project needs, but not the project: an editable one is found by a .pth file, which counts only in a
    # folder that is a site itself.
    needed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), str(Path(pytest.__file__).parents[1])}
    (packages / "needed.pth").write_text("\n".join(sorted(needed)))
    return Installed(folder / "bin", packages)


@pytest.fixture
def clashing(tmp_path):
    """A folder with packages named as ours in the repository and, beside them, a system, a pass and a neighbour."""
    for name in NAMES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
        (tmp_path / name / "theirs.py").write_text("NOTHING = None\n")
    write_loop(tmp_path)
    loop = (tmp_path / "my_loop.py").read_text()
    imports = "".join(f"from {name}.theirs import NOTHING\n" for name in NAMES)
    (tmp_path / "my_loop.py").write_text(imports + loop)
    return tmp_path


def write_case(folder):
    """The options that run moe_seq in one layer in a folder."""
    (folder / "small.json").write_text(case_text(small(CASES["moe_seq"])))
    return ["--case", "small.json", *SHORT]


def write_loop(folder):
    (folder / "my_loop.py").write_text(LOOP)
    (folder / "neighbour.py").write_text("NOTHING = None\n")


def test_the_wheel_holds_every_module_and_data_file(wheel):
    def tracked(name: str) -> bool:
        return name.endswith((".py", ".jinja", ".json", ".txt", "py.typed")) and "__pycache__" not in name

    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    own = {f"bitproof/{file.name}" for file in (ROOT / "bitproof").iterdir() if file.is_file()}
    linked = {
        f"bitproof/{link}/{file.relative_to(ROOT / name).as_posix()}"
        for name, link in zip(NAMES, LINKS, strict=True)
        for file in (ROOT / name).rglob("*")
    }
    assert held == {file for file in own | linked if tracked(file)}
    assert {"bitproof/builtin_cases/examples/fsdp2_loop.py", "bitproof/harness/report/html/report.html.jinja"} <= held
    assert any(name.startswith("bitproof/harness/graph/passes/overlap/") and name.endswith(".json") for name in held)


def test_in_an_empty_folder_cases_run_and_report(installed, tmp_path):
    done = installed.run("python", "-c", "import bitproof; print(bitproof.__file__)", cwd=tmp_path)
    assert done.stdout.split() == [str(installed.packages / "bitproof" / "__init__.py")]
    done = installed.run("bitproof", "list", "-k", "trainers", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "") and "loop_kept_gathered" in done.stdout
    extra = ["--extra-pass", "bitproof.builtin_cases.examples.extra_passes:wait_late"]
    done = installed.run("bitproof", "run", *write_case(tmp_path), *extra, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 EQUAL" in done.stdout
    done = installed.run("bitproof", "report", "reports/latest", cwd=tmp_path)
    assert done.returncode == 0 and "moe_seq" in done.stdout, done.stderr
    assert (tmp_path / "reports" / "latest" / "report.html").is_file()


@pytest.mark.slow
def test_in_a_folder_with_packages_named_as_ours_in_the_repository_both_are_found(installed, clashing):
    extra = ["--extra-pass", "my_loop:wait_late_too"]
    done = installed.run("bitproof", "run", *write_case(clashing), *extra, cwd=clashing)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    assert "1 EQUAL" in done.stdout


@pytest.mark.slow
def test_torchruns_ranks_find_a_users_modules_too(installed, clashing):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    command = ["run", "-k", "loop_kept_gathered", *SHORT, "--candidate", "my_loop:make"]
    done = installed.run("python", *torchrun, str(installed.bin / "bitproof"), *command, cwd=clashing)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 EQUAL" in done.stdout


def test_python_m_bitproof_is_the_command_in_such_a_folder_too(installed, clashing):
    done = installed.run("python", "-m", "bitproof", "list", "-k", "moe_seq", cwd=clashing)
    assert done.returncode == 0 and done.stdout.splitlines()[1].startswith("  moe_seq "), done.stderr


def test_installed_cases_are_pytest_items(installed, clashing):
    # `python -m pytest` would put the working directory first.
    code = "import sys; from pytest import console_main; sys.exit(console_main())"
    items = ["--pyargs", "bitproof.builtin_cases", "-k", "loop_kept_gathered"]
    done = installed.run("python", "-P", "-c", code, "-p", "no:cacheprovider", *items, cwd=clashing)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


class Around(NamedTuple):
    """What an example of a page needs to run: lines before and after it, the file it is saved as, how it ends."""

    before: str = ""
    after: str = ""
    file: str | None = None
    status: int = 0


FIXTURES = """
import pytest, torch

@pytest.fixture
def trainer():
    return torch.nn.Linear(2, 2)

@pytest.fixture
def resumed(trainer):
    return trainer
"""
PASSES = """
from bitproof.builtin_cases.examples.extra_passes import add_gradients_in_bfloat16 as add_in_bfloat16

def my_pass(module):
    pass
"""
LOOPS = "from bitproof.builtin_cases.examples.fsdp2_loop import kept_gathered as plain, kept_gathered as overlapped\n"
OWN_LOOP = """
import torch
import torch.distributed as dist

def Model():
    return torch.nn.Linear(8, 8)

def data(index):
    return torch.full((4, 8), 1.0 + index)

"""
RUN_IT = """
if __name__ == "__main__":
    import bitproof
    bitproof.assert_as_expected(bitproof.run(reference=Loop, candidate=Loop, world_size=2, steps=2))
"""
TO_PROVE = """
import torch

def f(x: torch.Tensor) -> torch.Tensor:
    return x + x

def g(x: torch.Tensor) -> torch.Tensor:
    return x.add(x)

x = torch.ones(2, 3)
"""
SAVES = """from typing import Any

import torch.distributed.checkpoint.state_dict_saver as dcp  # torch.distributed.checkpoint exports it, but not by name
from torch.distributed.checkpoint.state_dict import get_state_dict


class Loop:
    model: Any
    optimizer: Any
    data: Any

"""
AROUND = {
    ("proving.md", 0): Around(before=TO_PROVE),
    ("own-trainer.md", 1): Around(file="trainer.py", status=1),  # ranks alone have the process group that it asks
    ("systems.md", 0): Around(file="my_trainer.py"),
    ("systems.md", 2): Around(before=OWN_LOOP, after=RUN_IT),
    ("systems.md", 3): Around(before=SAVES),
    ("python.md", 1): Around(before="import bitproof\nimport torch\n", status=1),
    ("python.md", 2): Around(status=1),
}
EXAMPLES = [
    page
    for page in PAGES
    if page.name != "wild.md"  # its scripts go to other projects: they import those, and nothing of bitproof
    and any(match["language"] == "python" for match in BLOCK.finditer(page.read_text()))
]


def examples_in(page: Path, folder: Path) -> list[tuple[Path, int]]:
    """Each Python example of a page as a file in a folder, with the exit status that it should have."""
    for name, text in {"conftest.py": FIXTURES, "my_passes.py": PASSES, "my_loop.py": LOOPS}.items():
        (folder / name).write_text(text)
    write_report(folder / "out", [result(toy())], run_id="20260102T030405Z-abcdef")
    (folder / "out" / "latest").symlink_to("20260102T030405Z-abcdef")
    found = []
    shown = [match for match in BLOCK.finditer(page.read_text()) if match["language"] == "python"]
    for index, match in enumerate(shown):
        around = AROUND.get((page.name, index), Around())
        mark = match["mark"] or ""
        name = around.file or (mark.removeprefix("file: ") if mark.startswith("file: ") else f"test_example_{index}.py")
        (folder / name).write_text(around.before + match["text"] + around.after)
        found.append((folder / name, around.status))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("page", EXAMPLES, ids=[page.name for page in EXAMPLES])
def test_every_python_example_of_a_page_runs_from_the_wheel_and_its_types_are_right(installed, tmp_path, page):
    examples = examples_in(page, tmp_path)
    files = [str(path) for path, _ in examples]
    lenient = ["--allow-untyped-defs", "--allow-untyped-calls", "--allow-incomplete-defs"]  # as users write examples
    mypy = [sys.executable, "-m", "mypy", "--strict", *lenient, "--python-executable", str(installed.bin / "python")]
    for file in files:
        done = subprocess.run([*mypy, file], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    for path, status in examples:
        is_test = "def test_" in path.read_text()
        words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", path.name] if is_test else [path.name]
        done = installed.run("python", *words, cwd=tmp_path)
        assert done.returncode == status, f"{path.name}\n{done.stdout}\n{done.stderr}"


def test_a_users_types_are_checked_against_the_wheel(installed, tmp_path):
    (tmp_path / "wrong.py").write_text('import bitproof\n\nbitproof.run("moe_seq", steps="two")\n')
    # torch's own types take a minute to read, and say nothing about ours.
    (tmp_path / "mypy.ini").write_text(
        "[mypy]\n[mypy-torch.*]\nfollow_imports = skip\nfollow_imports_for_stubs = True\n"
    )
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--python-executable",
        str(installed.bin / "python"),
        "wrong.py",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and 'expected "int | None"' in done.stdout, done.stdout + done.stderr
