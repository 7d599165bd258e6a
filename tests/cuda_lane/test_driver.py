"""No process that ranks are forked from starts CUDA's driver: no rank of it could use a GPU. On a build for CUDA."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bitproof.harness.machine.compiler import compiler

SOURCE = Path(__file__).with_name("driver.c")


@pytest.fixture
def driver(tmp_path: Path) -> dict[str, str]:
    """Variables with which a process finds a driver that writes down who starts it, and says that there is a GPU."""
    if torch.version.cuda is None:
        pytest.skip("only a build of torch for CUDA asks for a driver; `make cuda-wheel` has one")
    library = tmp_path / "libcuda.so.1"
    subprocess.run([compiler(), "-x", "c", "-shared", "-fPIC", str(SOURCE), "-o", str(library)], check=True)
    (tmp_path / "libnvidia-ml.so.1").symlink_to(library)
    return {"LD_LIBRARY_PATH": str(tmp_path), "DRIVER_LOG": str(tmp_path / "started")}


def who_starts_it(driver: dict[str, str], folder: Path, *options: str) -> tuple[set[int], set[int], str]:
    """The processes that start the driver in a run on a GPU, their parents, and what the run says.

    Its ranks fail, as there is no device behind the driver."""
    command = [sys.executable, "-m", "bitproof", "run", "-k", "transformer_batch", "--steps", "1", "--no-control"]
    command += ["--device", "cuda", "--share-gpus", "--report-dir", str(folder), *options]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | driver, check=False)
    lines = [line.split() for line in Path(driver["DRIVER_LOG"]).read_text().splitlines()]
    return {int(own) for own, _ in lines}, {int(parent) for _, parent in lines}, done.stdout


@pytest.mark.ranks
def test_ranks_start_the_driver_and_what_they_are_forked_from_does_not(driver, tmp_path):
    starters, parents, said = who_starts_it(driver, tmp_path)
    assert "No CUDA GPUs are available" in said, "its ranks asked for their GPU"
    assert len(starters) > 1 and len(parents) == 1
    assert not starters & parents


@pytest.mark.ranks
def test_a_module_that_starts_the_driver_is_not_imported_before_ranks_are_forked(driver, tmp_path):
    (tmp_path / "starts_the_driver.py").write_text("import torch\ntorch.__config__.show()\n")
    driver["PYTHONPATH"] = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    starters, _, said = who_starts_it(driver, tmp_path, "--preload", "starts_the_driver")
    assert "the preloaded module starts_the_driver leaves a process that cannot be forked safely" in said
    assert "CUDA's driver, started" in said
    assert len(starters) == 1


@pytest.mark.ranks
def test_a_host_that_has_started_the_driver_forks_no_rank(driver, tmp_path):
    """What a release of torch may do by itself, one day: here the build's settings are asked of the host."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'bitproof.harness.execute.host.main' in ' '.join(sys.orig_argv):\n"
        "    import torch\n"
        "    torch.__config__.show()\n"
    )
    driver["PYTHONPATH"] = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    starters, _, said = who_starts_it(driver, tmp_path)
    assert "the process that ranks are forked from has started CUDA's driver" in said
    assert len(starters) == 1
