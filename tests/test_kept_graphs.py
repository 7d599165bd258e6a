"""Kept graphs from command to report: the second run reads what the first traced, and no edit is ever missed.

A kept graph that is no longer what would be traced is the worst that can happen here: it would make both EQUAL and
DIFFERENT lies. So each thing that decides a graph is changed, and the graph must be traced anew.
"""

from __future__ import annotations

import json
import os
import py_compile
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bitproof.builtin_cases import CASES
from tests.small import small

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

ROOT = Path(__file__).parents[1]


class Checkout:
    """A copy of our packages, and a folder of graphs of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.graphs = folder / "graphs"
        for package in ("bitproof", "harness", "reference", "cases"):
            shutil.copytree(
                ROOT / package, folder / package, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
            )
        (folder / "case.json").write_text(json.dumps(small(CASES["moe_seq"]).to_dict()))

    def run(self, *arguments: str, verdict: str = "EQUAL", **environment: str) -> dict[str, Any]:
        """One case's line in the report."""
        command = [sys.executable, "-m", "bitproof", "run", "--case", "case.json", "--world-size", "2", "--steps", "1"]
        variables = {"PYTHONPATH": str(self.folder), "BITPROOF_CACHE": str(self.graphs)} | environment
        subprocess.run([*command, "--no-control", *arguments], cwd=self.folder, env=os.environ | variables, timeout=300)
        [result] = json.loads((self.folder / "reports" / "latest" / "report.json").read_text())["cases"]
        assert result["verdict"] == verdict
        return result

    def precompile(self, out: str) -> None:
        """Precompile the case's step into a folder."""
        command = [sys.executable, "-m", "bitproof", "precompile", "case.json", "--world-size", "2", "--out", out]
        variables = {"PYTHONPATH": str(self.folder), "BITPROOF_CACHE": str(self.graphs)}
        subprocess.run(command, cwd=self.folder, env=os.environ | variables, timeout=300, check=True)

    def own_torch(self) -> Path:
        """A torch of this checkout's own: links to all that is installed, but for the functions of torch.nn."""
        installed, own = Path(torch.__file__).parent, self.folder / "torch"
        for folder, left_out in ((Path(), "nn"), (Path("nn"), "functional.py")):
            (own / folder).mkdir()
            for entry in (installed / folder).iterdir():
                if entry.name not in (left_out, "__pycache__"):
                    (own / folder / entry.name).symlink_to(entry)
        shutil.copy2(installed / "nn" / "functional.py", own / "nn")
        return own

    def digests(self) -> list[bytes]:
        """The recordings that the last run left, byte by byte."""
        files = (self.folder / "reports" / "latest" / "recordings").rglob("*.parquet")
        return [file.read_bytes() for file in sorted(files)]

    def code_hash(self) -> str:
        """The hash of the graph that the last run ran."""
        [manifest] = (self.folder / "reports" / "latest" / "recordings").glob("*/graph/manifest.json")
        return str(json.loads(manifest.read_text())["graph"]["code_hash"])

    def edit(self, name: str, old: str, new: str) -> None:
        """Change one place of a file."""
        text = (self.folder / name).read_text()
        assert text.count(old) == 1
        (self.folder / name).write_text(text.replace(old, new))

    def edit_unseen(self, name: str, old: str, new: str) -> None:
        """As `edit`, so that Python by itself would run the code from before: it has compiled that, and size and time
        are the same."""
        hide_edit(self.folder / name, lambda: self.edit(name, old, new))

    def forget_bytecode(self) -> None:
        """Remove what was compiled, so that Python by itself would run what the files say."""
        for folder in list(self.folder.rglob("__pycache__")):
            shutil.rmtree(folder)


def hide_edit(file: Path, edit: Callable[[], None]) -> None:
    """Make an edit that neither a file's size nor its time shows, of which Python has compiled the code from before."""
    py_compile.compile(str(file), doraise=True, invalidation_mode=py_compile.PycInvalidationMode.TIMESTAMP)
    before = file.stat()
    edit()
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def test_the_second_run_reads_the_graph_that_the_first_traced_and_every_change_has_it_traced_anew(
    tmp_path: Path,
) -> None:
    checkout = Checkout(tmp_path)
    assert checkout.run()["kept_graph"] is False
    traced, code = checkout.digests(), checkout.code_hash()
    result = checkout.run()
    assert result["kept_graph"] is True and [entry["name"] for entry in result["passes"]][1] == "chunk"
    assert traced and checkout.digests() == traced and checkout.code_hash() == code
    assert checkout.run("--steps", "2")["kept_graph"] is True, "as many steps as one likes"
    assert checkout.run("--candidate", "eager_chunked")["kept_graph"] is None, "no graph was made"

    assert checkout.run("--no-kept-graph")["kept_graph"] is False
    early = checkout.run("--early-grad-accumulation", verdict="DIFFERENT")  # this case's sums see where they are cast
    assert early["kept_graph"] is False, "another option"
    assert checkout.run(TORCH_LOGS="+inductor")["kept_graph"] is False, "another variable that torch reads"
    for file in checkout.graphs.iterdir():
        content = bytearray(file.read_bytes())
        content[100] ^= 1
        file.write_bytes(content)
    assert checkout.run()["kept_graph"] is False, "a flipped bit"
    assert checkout.run()["kept_graph"] is True

    checkout.edit("harness/graph/passes/clean_up.py", "from __future__", "# an edited pass\nfrom __future__")
    assert checkout.run()["kept_graph"] is False
    assert checkout.code_hash() == code
    place = "x_TD = x_BSD.flatten(0, -2)"
    checkout.edit("reference/layers/moe.py", place, f"{place}; x_TD = x_TD * 2")
    assert checkout.run()["kept_graph"] is False
    assert checkout.code_hash() != code and checkout.digests() != traced
    checkout.edit("reference/layers/moe.py", f"{place}; x_TD = x_TD * 2", place)
    assert checkout.run()["kept_graph"] is True, "what was put back is what it was"
    assert checkout.code_hash() == code


EARLY = (
    "harness/graph/passes/chunk/__init__.py",
    "early_grad_accumulation and tail:",
    "early_grad_accumulation or  tail:",
)
"""An edit of equal size, with which the chunk pass adds gradients as early accumulation does: other bits."""


def test_an_edit_that_compiled_code_cannot_show_is_different_from_the_cache_too(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    assert checkout.run()["kept_graph"] is False
    code = checkout.code_hash()
    checkout.edit_unseen(*EARLY)
    for kept in (False, True):
        assert checkout.run(verdict="DIFFERENT")["kept_graph"] is kept
    assert checkout.code_hash() != code
    checkout.forget_bytecode()
    assert checkout.run(verdict="DIFFERENT")["kept_graph"] is True, "compiled or not, it is the same code"
    checkout.run("--no-kept-graph", verdict="DIFFERENT")
    checkout.edit_unseen(EARLY[0], EARLY[2], EARLY[1])
    assert checkout.run()["kept_graph"] is True, "the first graph"
    assert checkout.code_hash() == code


def test_of_two_checkouts_that_share_a_folder_of_graphs_none_reads_what_other_code_made(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    one, two = Checkout(tmp_path / "one"), Checkout(tmp_path / "two")
    two.graphs = one.graphs
    assert one.run()["kept_graph"] is False
    two.edit_unseen(*EARLY)
    assert two.run(verdict="DIFFERENT")["kept_graph"] is False
    assert one.run()["kept_graph"] is True
    assert two.run(verdict="DIFFERENT")["kept_graph"] is True


HELPER = "lazy_helper.py"
LAZILY = "; import lazy_helper; x_TD = x_TD * lazy_helper.factor()"
CUSTOMIZE = """
import builtins, sys
sys.path.append("parts.zip")
import zipped_part
builtins.factor = lambda: 1.0 * zipped_part.FACTOR
"""


def write_archive(file: Path, factor: float) -> None:
    """A module in an archive, of the same size and time each time."""
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(zipfile.ZipInfo("zipped_part.py"), f"FACTOR = {factor}\n")


def test_a_module_that_only_the_step_imports_and_what_is_patched_when_python_starts_count(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    place = "x_TD = x_BSD.flatten(0, -2)"
    checkout.edit("reference/layers/moe.py", place, place + LAZILY)
    (tmp_path / "sitecustomize.py").write_text(CUSTOMIZE)
    (tmp_path / HELPER).write_text("import builtins\n\n\ndef factor():\n    return 1.0 * builtins.factor()\n")
    write_archive(tmp_path / "parts.zip", 1.0)
    runs = [checkout.run()["kept_graph"] for _ in range(3)]
    assert runs[-1] is True, runs
    code = checkout.code_hash()
    for name in (HELPER, "sitecustomize.py", "parts.zip"):
        if name == "parts.zip":
            written = (tmp_path / name).stat()
            write_archive(tmp_path / name, 2.0)
            os.utime(tmp_path / name, ns=(written.st_atime_ns, written.st_mtime_ns))
        else:
            checkout.edit_unseen(name, "1.0", "2.0")
        checkout.forget_bytecode()
        assert checkout.run()["kept_graph"] is False
        assert checkout.code_hash() != code
        code = checkout.code_hash()


def test_a_step_is_precompiled_of_what_files_say_and_no_run_of_other_files_reads_it(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    precompiled = ("--precompiled", "step")
    checkout.precompile("step")
    checkout.run(*precompiled)
    checkout.edit_unseen(*EARLY)
    refused = checkout.run(*precompiled, verdict="ERROR")["error"]
    assert "ArtifactError: the precompiled step was made for something else: passes" in refused
    checkout.precompile("step")
    checkout.run(*precompiled, verdict="DIFFERENT")
    functional = checkout.own_torch() / "nn" / "functional.py"
    checkout.run(*precompiled, verdict="DIFFERENT")
    hide_edit(functional, lambda: functional.write_text(functional.read_text().replace("# noqa", "# nope", 1)))
    refused = checkout.run(*precompiled, verdict="ERROR")["error"]
    assert "ArtifactError: the precompiled step was made for something else: torch" in refused
    checkout.precompile("step")
    (tmp_path / "sitecustomize.py").write_text("import torch\n")
    refused = checkout.run(*precompiled, verdict="ERROR")["error"]
    assert "ArtifactError: the precompiled step was made for something else: start up" in refused
