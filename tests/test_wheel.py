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
from tests.small import small

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parent.parent
NAMES = ("harness", "reference", "cases")
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
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
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
    """A folder with packages of our names and, beside them, a system and a pass with a neighbour of their own."""
    for name in NAMES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('theirs was imported')\n")
        (tmp_path / name / "theirs.py").write_text("def make(case, mesh): pass\n")
    write_loop(tmp_path)
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
        return name.endswith((".py", ".jinja", ".json", "py.typed")) and "__pycache__" not in name

    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    files = (file.relative_to(ROOT) for top in ("bitproof", *NAMES) for file in (ROOT / top).rglob("*"))
    assert held == {file.as_posix() for file in files if tracked(file.as_posix())}
    assert {"cases/examples/fsdp2_loop.py", "harness/report/report.html.jinja"} <= held
    assert any(name.startswith("harness/graph/passes/overlap/") and name.endswith(".json") for name in held)


def test_in_an_empty_folder_cases_run_and_report(installed, tmp_path):
    done = installed.run("python", "-c", "import harness, cases; print(harness.__file__, cases.__file__)", cwd=tmp_path)
    assert done.stdout.split() == [str(installed.packages / name / "__init__.py") for name in ("harness", "cases")]
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
def test_in_a_folder_with_packages_of_our_names_ours_run_and_the_clash_is_named_once(installed, clashing):
    extra = ["--extra-pass", "my_loop:wait_late_too"]
    done = installed.run("bitproof", "run", *write_case(clashing), *extra, cwd=clashing)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 EQUAL" in done.stdout
    first = f"bitproof: {clashing / 'harness'}, {clashing / 'reference'} and {clashing / 'cases'} are not imported: "
    assert done.stderr.startswith(first) and done.stderr.count("are not imported") == 1
    done = installed.run("bitproof", "run", "-k", "moe_seq", *SHORT, "--candidate", "cases.theirs:make", cwd=clashing)
    assert done.returncode == 2
    ours = f"cases is bitproof's own package, in {installed.packages}"
    assert done.stderr.endswith(f"  fix: rename {clashing / 'cases'}: {ours}\n")


@pytest.mark.slow
def test_torchruns_ranks_find_a_users_modules_and_not_their_packages_of_our_names(installed, clashing):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    command = ["run", "-k", "loop_kept_gathered", *SHORT, "--candidate", "my_loop:make"]
    done = installed.run("python", *torchrun, str(installed.bin / "bitproof"), *command, cwd=clashing)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 EQUAL" in done.stdout and done.stderr.count("are not imported") == 1


def test_python_m_bitproof_is_the_command_in_such_a_folder_too(installed, clashing):
    done = installed.run("python", "-m", "bitproof", "list", "-k", "moe_seq", cwd=clashing)
    assert done.returncode == 0 and done.stdout.splitlines()[1].startswith("moe_seq "), done.stderr


@pytest.mark.slow
def test_modules_of_our_names_do_not_matter_either(installed, tmp_path):
    write_loop(tmp_path)
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text("raise ImportError('theirs was imported')\n")
    command = ["run", "-k", "loop_kept_gathered", *SHORT, "--candidate", "my_loop.py:make"]
    done = installed.run("bitproof", *command, cwd=tmp_path, PYTHONPATH=".")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{tmp_path / 'cases.py'} are not imported" in done.stderr


def test_installed_cases_are_pytest_items(installed, clashing):
    # `python -m pytest` would put the working directory first.
    code = "import sys; from pytest import console_main; sys.exit(console_main())"
    items = ["--pyargs", "cases", "-k", "loop_kept_gathered"]
    done = installed.run("python", "-P", "-c", code, "-p", "no:cacheprovider", *items, cwd=clashing)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
