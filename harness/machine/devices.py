"""Chooses the devices of a case's ranks, and locks GPUs so that no two runs use the same GPU. Loads no torch."""

from __future__ import annotations

import contextlib
import getpass
import importlib.util
import os
import platform
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from bitproof.harness.case import Case
from bitproof.harness.errors import CaseError
from bitproof.harness.machine.describe import gpu_models
from bitproof.harness.options import CollectivesRequest
from bitproof.harness.runtime import launched
from bitproof.harness.shared_memory import is_supported


@dataclass(frozen=True)
class Placement:
    """The devices of a case's ranks, and how the ranks communicate.

    - `backend`: the backend of torch.distributed.
    - `shared`: whether ranks share GPUs. If so, rank r runs on GPU r % num_gpus.
    - `in_memory`: whether ranks communicate through shared memory instead of the backend. This changes no bit.
    - `native`: whether NCCL itself adds the ranks' values. Its order of additions is fixed but not documented.
    """

    device: Literal["cpu", "cuda"] = "cpu"
    backend: Literal["gloo", "nccl"] = "gloo"
    num_gpus: int = 0
    shared: bool = False
    in_memory: bool = False
    native: bool = False

    @property
    def collectives(self) -> Literal["shared", "gloo", "nccl", "native"]:
        """Return how ranks communicate, in the words of reports. With "native", NCCL itself adds their values."""
        return "shared" if self.in_memory else "native" if self.native else self.backend

    def device_of(self, rank: int) -> str:
        """Return a rank's device in torch's notation, such as "cpu" or "cuda:3"."""
        return "cpu" if self.device == "cpu" else f"cuda:{rank % self.num_gpus}"


def place(
    request: str,
    world_size: int,
    num_gpus: int,
    collectives: CollectivesRequest | None = None,
    *,
    share_gpus: bool = False,
) -> Placement:
    """Choose the devices of a case whose ranks are all on this machine, and how the ranks communicate.

    - `request`: "auto", "cpu" or "cuda". "auto" uses GPUs only if each rank gets its own.
    - `collectives`: how the user wants ranks to communicate; None for ranks that a launcher started.
    - `share_gpus`: whether ranks may share GPUs. They then communicate over gloo.

    Raises CaseError if "cuda" finds too few GPUs, or if `collectives` is not possible on the chosen devices.
    """
    if request not in ("auto", "cpu", "cuda"):
        raise CaseError("unknown device", expected="auto, cpu or cuda", found=repr(request))
    if request == "cpu" or (request == "auto" and num_gpus < world_size):
        return Placement(in_memory=_in_memory(collectives))
    if num_gpus == 0:
        raise CaseError(
            "the case asks for CUDA, and this machine offers none",
            expected="at least 1 GPU that torch can use",
            found="0 GPUs",
            fix="run with --device cpu, or see `bitproof doctor`",
        )
    if num_gpus >= world_size:
        return _over_nccl(Placement("cuda", "nccl", num_gpus), collectives)
    # A run without NCCL must not look like a run with NCCL, so sharing is never chosen silently.
    if not share_gpus:
        raise CaseError(
            "there are fewer GPUs than ranks, and NCCL gives each rank one of its own",
            expected=f"{world_size} GPUs for {world_size} ranks",
            found=f"{num_gpus} that torch can use",
            fix=f"choose --world-size {num_gpus}, or let ranks share them over gloo, which tests no NCCL: --share-gpus",
        )
    # NCCL refuses two ranks on one GPU, unless each is configured as a host of its own. This variable tries that.
    if os.environ.get("BITPROOF_SHARED_NCCL") == "1":
        return _over_nccl(Placement("cuda", "nccl", num_gpus, shared=True), collectives)
    return Placement("cuda", "gloo", num_gpus, shared=True, in_memory=_in_memory(collectives))


def _in_memory(request: CollectivesRequest | None) -> bool:
    if request == "native":
        raise CaseError(
            "native collectives are NCCL's own, and these ranks do not meet over NCCL",
            expected="--device cuda and a GPU for each rank",
            found="--collectives native",
            fix="leave --collectives out",
        )
    if request == "shared" and not is_supported():
        raise CaseError(
            "ranks cannot meet in shared memory on this machine",
            expected="Linux on x86_64 or aarch64, whose kernel has futex",
            found=f"{platform.system()} on {platform.machine()}",
            fix="leave --collectives out, or give --collectives gloo",
        )
    # None comes from ranks of a launcher, which share no memory.
    return request in ("auto", "shared") and is_supported()


def _over_nccl(placement: Placement, request: CollectivesRequest | None) -> Placement:
    if request == "shared":
        raise CaseError(
            "ranks that each have a GPU do not meet in shared memory",
            expected="collectives over NCCL",
            found=f"--collectives {request}",
            fix="leave --collectives out, or run with --device cpu",
        )
    if request == "gloo":
        return replace(placement, backend="gloo")
    return replace(placement, native=request == "native")


def unmet_requirement(case: Case, request: str) -> str | None:
    """Return what a case requires and this machine lacks: "it needs scipy, the extra `placement`".

    None if nothing is known to be missing. GPUs are counted by the driver's list, not by torch.
    """
    if case.requires is None:
        return None
    if case.requires == "scipy":
        return None if importlib.util.find_spec("scipy") else "it needs scipy, the extra `placement`"
    num_gpus, ranks = len(gpu_models()), case.most_ranks
    if request == "cuda" and num_gpus:  # too few GPUs are a usage error: `place` reports it
        return None
    if num_gpus and launched.is_rank() and request == "auto":  # other machines have GPUs, too
        return None
    if num_gpus and place(request, ranks, num_gpus).device == case.requires:
        return None
    return f"it needs CUDA; its {ranks} ranks run on the CPU here ({num_gpus} GPUs, --device {request})"


@contextlib.contextmanager
def lease_gpus(placement: Placement, world_size: int, folder: Path | None = None) -> Iterator[None]:
    """Context in which the GPUs of a case's ranks are locked. First waits until no other run has locked them.

    The lock files stay in `folder`, by default in the user's temporary folder.
    """
    with contextlib.ExitStack() as held:
        if placement.device == "cuda":
            from filelock import FileLock

            folder = folder or Path(tempfile.gettempdir()) / f"bitproof-gpus-{getpass.getuser()}"
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # In ascending order, so two runs cannot deadlock. The files are never removed: if a file were removed while
            # another run waits for it, two runs could get the same GPU.
            for index in range(min(world_size, placement.num_gpus)):
                held.enter_context(FileLock(folder / f"gpu{index}.lock"))
        yield
