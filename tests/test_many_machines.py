"""The page on many machines: its Slurm script, its Kubernetes job and its ssh script start ranks that fit together."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

from bitproof.harness.cli import main

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "how-to" / "many-machines.md").read_text()
MACHINES = ("node0", "node1")


@functools.cache
def options_of_run() -> str:
    """What `bitproof run --help` prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        main(["run", "--help"])
    return printed.getvalue()


def saved(name: str) -> str:
    """The file that the page has its reader save."""
    found = re.search(rf"<!-- file: {re.escape(name)} -->\n```\w+\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert found, name
    return found[1]


def run(script: str, folder: Path, commands: dict[str, str], environment: dict[str, str]) -> list[list[str]]:
    """Run a script over stand-ins for what a cluster has; the words of each torchrun that it starts."""
    bin_dir, asked = folder / "bin", folder / "asked"
    bin_dir.mkdir()
    for name, body in commands.items():
        path = bin_dir / name
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)
    path = folder / "script"
    path.write_text(script)
    ended = subprocess.run(
        ["bash", str(path)],
        cwd=folder,
        env={"PATH": f"{bin_dir}:{os.environ['PATH']}", "ASKED": str(asked)} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return sorted(shlex.split(line) for line in asked.read_text().splitlines())


# One write a line: the script starts its commands side by side, and two writes would interleave.
LOGS_ITS_ARGUMENTS = 'printf "%s\\n" "$(printf "%q " "$@")" >> "$ASKED"'


def check_ranks(words: list[str]) -> tuple[int, int, str]:
    """Hold the words after `torchrun` to torch's parser and our options; nodes, ranks of each, and where they meet."""
    given = get_args_parser().parse_args(words)
    assert given.module and given.training_script == "bitproof"
    command, *options = given.training_script_args
    assert command == "run"
    for option in (word for word in options if word.startswith("-")):
        assert re.search(rf"(?<![\w-]){option}(?![\w-])", options_of_run()), option
    nodes, ranks = int(given.nnodes), int(given.nproc_per_node)
    assert int(options[options.index("--world-size") + 1]) == nodes * ranks
    where = given.rdzv_endpoint or f"{given.master_addr}:{given.master_port}"
    return nodes, ranks, where


@pytest.mark.parametrize("num_nodes", [2, 4])
def test_the_slurm_script_starts_one_torchrun_a_node_and_all_meet_at_the_first(tmp_path: Path, num_nodes: int) -> None:
    script = saved("bitproof.sbatch")
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", script, re.MULTILINE))
    assert asked["ntasks-per-node"] == "1"
    nodes = "".join(f"node{i}\\n" for i in range(num_nodes))
    commands = {
        "scontrol": f'[ "$*" = "show hostnames LIST" ] && printf "{nodes}"',
        "srun": 'while [[ "$1" == --* ]]; do shift; done\nfor _ in $(seq "$SLURM_NNODES"); do "$@"; done',
        "torchrun": LOGS_ITS_ARGUMENTS,
    }
    environment = {"SLURM_NNODES": str(num_nodes), "SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "LIST"}
    started = run(script, tmp_path, commands, environment)
    assert len(started) == num_nodes
    for words in started:
        assert check_ranks(words) == (num_nodes, int(asked["gpus-per-node"]), "node0:29500")
        given = get_args_parser().parse_args(words)
        assert (given.rdzv_backend, given.rdzv_id) == ("c10d", "17")


def test_the_kubernetes_job_has_the_ranks_that_its_command_counts() -> None:
    job = yaml.safe_load(saved("bitproof.yaml"))
    assert job["kind"] == "PyTorchJob"
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert replicas["Master"]["replicas"] == 1
    num_nodes = sum(part["replicas"] for part in replicas.values())
    for part in replicas.values():
        [container] = part["template"]["spec"]["containers"]
        assert container["name"] == "pytorch", "the operator sets variables in the container of this name"
        assert part["restartPolicy"] == "Never"
        program, *words = container["command"]
        assert program == "torchrun"
        words = ["--nnodes", str(num_nodes), *words]  # PET_NNODES says so in each pod
        nodes, ranks, _ = check_ranks(words)
        assert (nodes, ranks) == (num_nodes, int(job["spec"]["nprocPerNode"]))
        assert container["resources"]["limits"]["nvidia.com/gpu"] == ranks


def test_the_ssh_script_gives_each_machine_its_rank_and_ends_as_the_first_does(tmp_path: Path) -> None:
    ssh = 'echo "$1" >> "$HOSTS"; bash -c "${2/cd bitproof && OMP_NUM_THREADS=1 .venv\\/bin\\/torchrun/torchrun}"'
    hosts = tmp_path / "hosts"
    started = run(saved("everywhere.sh"), tmp_path, {"ssh": ssh, "torchrun": LOGS_ITS_ARGUMENTS}, {"HOSTS": str(hosts)})
    assert sorted(hosts.read_text().split()) == list(MACHINES)
    given = [get_args_parser().parse_args(words) for words in started]
    assert sorted(x.node_rank for x in given) == [0, 1]
    assert {check_ranks(words) for words in started} == {(2, 8, "node0:29500")}
    assert {x.rdzv_backend for x in given} == {"static"}


def test_a_script_that_counts_other_ranks_than_it_starts_is_seen(tmp_path: Path) -> None:
    script = saved("everywhere.sh").replace("* 8))", "* 4))")
    ssh = 'bash -c "${2/cd bitproof && OMP_NUM_THREADS=1 .venv\\/bin\\/torchrun/torchrun}"'
    [words, _] = run(script, tmp_path, {"ssh": ssh, "torchrun": LOGS_ITS_ARGUMENTS}, {})
    with pytest.raises(AssertionError):
        check_ranks(words)
