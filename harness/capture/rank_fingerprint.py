"""Collect the facts about a rank's code and machine that can change a bit.

A single manifest describes all ranks. So ranks that differ, for example by another build of torch, are refused before
they take a step.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bitproof.harness.capture.environment import environment_of_keys
from bitproof.harness.capture.manifest import commit, machine
from bitproof.harness.errors import CaseError
from bitproof.harness.runtime.sources import (
    OWN,
    digest_of_loaded,
    mapped_files,
    own_digest,
    start_up_code,
    torch_digest,
)

Facts = dict[str, str]
"""Facts about a rank, by name."""

_MACHINE = (
    *("bitproof", "python", "numpy", "triton", "torch", "cuda", "libc", "cpu_capability", "architecture", "gpu_models"),
)
# Variables about a machine's network, devices and folders, or about logs: they change no bit, so machines may differ.
_NODE_SPECIFIC = re.compile(
    r".*(_IFNAME|_HCA|_HOSTID|_DEBUG|_DEBUG_FILE|_DEBUG_SUBSYS|_LOGS?|_HOME|_PATH|_DIR|_FILE)$"
    r"|CUDA_VISIBLE_DEVICES|CUDA_DEVICE_ORDER|TORCHELASTIC_.*"
)
# The name of the module of a user's file ends with the first digits of the file's sha256.
_NAMED_FILE = re.compile(r"_[0-9a-f]{8}$")
MAX_HASHED = 64 << 20
"""The size in bytes of the largest library that is hashed. Larger libraries, such as CUDA's, are compared by size
only."""
_SYSTEM_FOLDERS = ("/lib", "/usr/lib")
_MAX_SHOWN = 20


def facts_of_process() -> Facts:
    """Return the facts that are the same on all ranks that this process forks: versions, builds, environment variables.

    Imports torch.
    """
    from bitproof.harness.machine.torch_build import torch_build

    known = machine()
    facts = {name: str(known[name]) for name in _MACHINE if known.get(name) is not None}
    facts |= {
        "bitproof's sources": f"sha256 {own_digest()}",
        "commit": str(commit()),
        "build of torch": f"sha256 {_digest_of_build(torch_build().parts())}",
        "files of torch": f"sha256 {torch_digest()[:16]}",
    }
    facts |= {f"run as Python starts: {name}": f"sha256 {digest[:16]}" for name, digest in start_up_code().items()}
    named = {name: value for name, value in environment_of_keys().items() if not _NODE_SPECIFIC.fullmatch(name)}
    return facts | {f"environment {name}": value for name, value in named.items()}


def _digest_of_build(build: Sequence[str]) -> str:
    # Without the line about this machine's CPU, for which there is another fact.
    lines = [line for line in "\n".join(build).splitlines() if "CPU capability usage" not in line]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def facts_of_rank(gpu: Mapping[str, object] | None, *, with_code: bool = True) -> Facts:
    """Return the facts that only a rank itself knows: its device and, with `with_code`, the modules and libraries that
    it has loaded.

    `gpu` has the facts from CUDA; None on a CPU.
    """
    code = loaded_files() if with_code else {}
    if gpu is None:
        return code | {"cpu": str(machine().get("cpu"))}
    # The links between GPUs differ between machines, and only a rank per machine knows them.
    return code | {name: str(value) for name, value in gpu.items() if name != "gpu_topology" and value is not None}


def loaded_files() -> Facts:
    """Return the sha256 of all loaded modules and libraries, as in `{"module NAME": "sha256 ...", "library FILE":
    ...}`.

    Torch, Python, bitproof itself and the system's libraries are left out. The trainers among bitproof's cases are
    included.
    """
    import torch

    # `facts_of_process` has facts about torch, Python and bitproof's own packages. The system's libraries, and modules
    # that list the paths of editable installations, may differ between machines.
    passed_over = {"torch", *sys.stdlib_module_names}
    own_packages = tuple(f"bitproof.{package}." for package in OWN)
    found, files = {}, set()
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str):
            files.add(file)
        is_covered = name.partition(".")[0] in passed_over or f"{name}.".startswith((*own_packages, "__editable__"))
        if is_covered or not isinstance(file, str):
            continue
        if digest := digest_of_loaded(file):
            # The name of such a module changes with its content, so only names without the hash can be compared.
            named = _NAMED_FILE.sub("", name) if name.endswith(f"_{digest[:8]}") else name
            found[f"module {named}"] = f"sha256 {digest[:16]}"
    elsewhere = (
        *_SYSTEM_FOLDERS,
        f"{sysconfig.get_path('stdlib')}/lib-dynload/",
        f"{os.path.dirname(torch.__file__)}/",
    )
    for file in mapped_files() - files - {os.path.realpath(sys.executable)}:
        if not file.startswith(elsewhere) and os.path.isfile(file):
            found[f"library {os.path.basename(file)}"] = _describe_library(file)
    return found


def _describe_library(file: str) -> str:
    size = os.path.getsize(file)
    return f"{size} bytes" if size > MAX_HASHED else f"sha256 {str(digest_of_loaded(file))[:16]}"


@dataclass(frozen=True, kw_only=True)
class Differences:
    """The ranks that differ in some fact from the lowest rank that has this fact, and a line for each fact in which
    ranks differ.
    """

    ranks: list[int]
    lines: list[str]

    def refuse(self) -> None:
        """Raise CaseError, which names ranks and facts, if there are any differences."""
        if not self.lines:
            return
        left = len(self.lines) - _MAX_SHOWN
        shown = self.lines[:_MAX_SHOWN] + ([f"and {left} more"] if left > 0 else [])
        raise CaseError(
            f"{describe_ranks(self.ranks)} {'is' if len(self.ranks) == 1 else 'are'} not made of what the others are",
            expected="one release, one installation and one environment on every rank",
            found="\n    ".join(shown),
            fix="bring all machines to one commit, one installation and one environment",
        )


def differences(by_rank: Sequence[Facts], *, must_all_have: bool) -> Differences:
    """Compare the facts of ranks. `by_rank` has each rank's facts.

    With `must_all_have`, a fact that only some ranks have is a difference. Otherwise a fact is compared only between
    the ranks that have it.
    """
    lines: list[str] = []
    others: set[int] = set()
    for name in sorted({name for facts in by_rank for name in facts}):
        ranks_by_value: dict[str | None, list[int]] = {}
        for rank, facts in enumerate(by_rank):
            # A rank may have loaded a module that others do not need, such as that of its pipeline stage.
            if name in facts or must_all_have:
                ranks_by_value.setdefault(facts.get(name), []).append(rank)
        if len(ranks_by_value) > 1:
            first = min(rank for ranks in ranks_by_value.values() for rank in ranks)
            # The lowest rank that has the fact is taken as right; the others are the ranks to refuse.
            others |= {rank for ranks in ranks_by_value.values() if first not in ranks for rank in ranks}
            values = (
                f"{'nothing' if value is None else value} on {describe_ranks(ranks)}"
                for value, ranks in ranks_by_value.items()
            )
            lines.append(f"{name}: {'; '.join(values)}")
    return Differences(ranks=sorted(others), lines=lines)


def describe_ranks(ranks: Sequence[int]) -> str:
    """Name ranks in words, such as "rank 3" and "ranks 1, 3 to 5"."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    lines = [
        str(part[0]) if len(part) == 1 else f"{part[0]}{' to ' if len(part) > 2 else ', '}{part[-1]}" for part in parts
    ]
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(lines)}"
