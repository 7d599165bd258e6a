"""Counts and describes GPUs without starting CUDA in this process. Imports no torch before use.

If a process has started CUDA, processes forked from it cannot use a GPU. So these functions ask the driver's library,
or run another process.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bitproof.harness.processes.command import CommandError, run_command
from bitproof.harness.records import MachineFacts

if TYPE_CHECKING:
    import torch

_COUNT = "import torch; print(torch.cuda.device_count())"
_COUNT_SECONDS = 60
_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED
_TOPOLOGY_SECONDS = 20
_CUDA_VARIABLES = ("NCCL_", "CUBLASLT_", "CUDNN_", "NVIDIA_TF32_OVERRIDE")
_OF_ONE_RUN = ("NCCL_HOSTID",)


def num_gpus() -> int:
    """Return the number of GPUs that torch can use. Does not start CUDA."""
    import torch

    from bitproof.harness.torch_compat import count_gpus_by_driver

    # Ranks are forked from this process, and could not use a GPU after a start of CUDA here.
    if torch.version.cuda is None:
        return 0
    counted = count_gpus_by_driver()
    return _count_elsewhere() if counted is None else counted


def visible_gpus() -> tuple[str, ...]:
    """Return identifiers of the GPUs that torch can use, in torch's order, such as "GPU-5f1c...". Does not start CUDA.

    A GPU has the same identifier in all processes, while its index may be 0 in each of them.
    """
    from bitproof.harness.torch_compat import name_visible_gpus

    count = num_gpus()
    return tuple(name_visible_gpus(count)) if count else ()


def _count_elsewhere() -> int:
    command = [sys.executable, "-c", _COUNT]
    try:
        done = run_command(command, _COUNT_SECONDS)
        # The last word only, since an imported package may print something before it.
        return int(done.out.split()[-1]) if done.status == 0 else 0
    except (CommandError, ValueError, IndexError):
        return 0


def has_started_driver() -> bool:
    """Return whether CUDA's driver was started in this process. If so, no process forked from it can use a GPU."""
    # `torch.cuda.is_initialized` is not enough: torch starts the driver even for questions about its build.
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    # This call creates no context: it fails with a status of its own if the driver was never initialized.
    context = ctypes.c_void_p()
    status: int = driver.cuCtxGetCurrent(ctypes.byref(context))
    return status != _NOT_INITIALIZED


def read_gpu_facts(device: torch.device) -> MachineFacts | None:
    """Return facts about a rank's GPU that can change a bit, by name; None if `device` is no GPU.

    Only a process that has started CUDA can read them.
    """
    import torch

    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return {
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None,
        "cudnn": torch.backends.cudnn.version(),
        "cublas": _cublas_version(Path("/proc/self/maps")),
        "driver": driver_version(Path("/proc/driver/nvidia/version")),
        "gpu": f"{properties.name}, {properties.multi_processor_count} multiprocessors, "
        f"compute capability {properties.major}.{properties.minor}",
        # The same for all ranks of a machine, so only the rank with device cuda:0 reads it.
        "gpu_topology": gpu_topology() if not device.index else None,
        "nccl_conf": read_nccl_conf(os.environ, Path("/etc"), Path.home()),
    }


def read_gpu_for_keys(device: torch.device) -> MachineFacts:
    """Return facts about a rank's GPU, by name, that decide its traced graph: torch chooses operators by them, or they
    appear in the trace."""
    import torch

    properties = torch.cuda.get_device_properties(device)
    return {
        "index": device.index,
        "gpu": f"{properties.name}, {properties.multi_processor_count} multiprocessors, "
        f"compute capability {properties.major}.{properties.minor}, {properties.total_memory} bytes",
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "driver": driver_version(Path("/proc/driver/nvidia/version")),
    }


def read_gpu_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables in `environment` that CUDA's libraries read, sorted by name.

    `environment` must be that of a process that has loaded these libraries.
    """
    named = {name: value for name, value in sorted(environment.items()) if name.startswith(_CUDA_VARIABLES)}
    return {name: value for name, value in named.items() if name not in _OF_ONE_RUN}


def agreed_facts(by_rank: Sequence[Mapping[str, str | int | list[str] | None] | None]) -> MachineFacts:
    """Merge the facts of all ranks. If ranks disagree on a fact, its value is a list with an entry per rank.

    For example, "driver" is "550.54.15", or ["rank 0: 550.54.15", "rank 1: 535.86.10"]. Ranks whose facts are None, or
    that lack this fact, do not count.
    """
    known = [(rank, facts) for rank, facts in enumerate(by_rank) if facts is not None]
    agreed: MachineFacts = {}
    for name in dict.fromkeys(name for _, facts in known for name in facts):
        said = {rank: facts[name] for rank, facts in known if facts.get(name) is not None}
        # By their text, since a list has no hash.
        distinct = list({repr(value): value for value in said.values()}.values())
        one = distinct[0] if distinct else None
        agreed[name] = one if len(distinct) < 2 else [f"rank {rank}: {value}" for rank, value in said.items()]
    return agreed


def driver_version(file: Path) -> str | None:
    try:
        found = re.search(r"\b\d+\.\d+(\.\d+)?\b", file.read_text(encoding="utf-8"))
    except OSError:
        return None
    return found[0] if found else None


def read_nccl_conf(environment: Mapping[str, str], etc: Path, home: Path) -> list[str]:
    """Return the settings in NCCL's configuration files as `NAME=VALUE`: first the system's file, then the user's.

    https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
    """
    # The variable replaces the user's file, not the system's.
    own = environment.get("NCCL_CONF_FILE")
    settings: list[str] = []
    for file in (etc / "nccl.conf", Path(own) if own else home / ".nccl.conf"):
        try:
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        settings += [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    return settings


def _cublas_version(maps: Path) -> int | None:
    try:
        lines = maps.read_text(encoding="utf-8", errors="replace").splitlines()
        # If the library is not loaded, the unpacking raises ValueError.
        [path, *_] = (line.split(maxsplit=5)[5] for line in lines if "/libcublasLt.so" in line)
        # The library that torch has loaded: another version may be installed besides.
        get_version = ctypes.CDLL(path).cublasLtGetVersion
    except (OSError, ValueError, AttributeError):
        return None
    # By default, ctypes expects a C `int`, which is narrower.
    get_version.restype = ctypes.c_size_t
    return int(get_version())


def gpu_topology() -> list[str] | None:
    """Return the links between GPUs, as the rows of `nvidia-smi topo -m`; None if the command fails."""
    command = ["nvidia-smi", "topo", "-m"]
    try:
        done = run_command(command, _TOPOLOGY_SECONDS)
    except CommandError:
        return None
    if done.status:
        return None
    # nvidia-smi underlines the header by escape sequences.
    rows = re.sub(r"\x1b\[[0-9;]*m", "", done.out).partition("Legend:")[0].splitlines()
    return [" ".join(row.split()) for row in rows if row.strip()]
