"""The functions that are the same in every self-contained file: make inputs, join process groups, compare.

`rendering` copies them, and fills in `reference`, `candidate` and the tables. This module imports only torch and the
standard library.
"""

from __future__ import annotations

import base64
import multiprocessing
import os
import tempfile
import traceback
import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

WORLD_SIZE = 1
GROUPS: dict[str, list[list[int]]] = {}
INPUTS: dict[str, tuple[str, tuple[int, ...], tuple[int, ...], list[Any]]] = {}
wrap_group: Any = None


def reference(**inputs: Tensor) -> dict[str, Tensor]:
    """Placeholder: a written file has a function that returns the reference's outputs by name."""
    return inputs


def candidate(**inputs: Tensor) -> dict[str, Tensor]:
    """Placeholder: a written file has a function that returns the candidate's outputs from the same inputs."""
    return inputs


def make_input(name: str, rank: int) -> Tensor:
    """Return an input of a rank: its stored content, or random numbers in [-1, 1), seeded by name and rank, if it has
    none.
    """
    dtype, shape, stride, contents = INPUTS[name]
    x = torch.empty_strided(shape, stride, dtype=getattr(torch, dtype))
    if not contents:
        generator = torch.Generator().manual_seed(zlib.crc32(f"{name}, rank {rank}".encode()))
        return x.copy_(torch.rand(shape, generator=generator) * 2 - 1)
    content = contents[rank % len(contents)]
    if isinstance(content, list):
        return x.copy_(torch.tensor(content, dtype=x.dtype).view(shape))
    data = bytearray(zlib.decompress(base64.b64decode(content)))
    return x.copy_(torch.frombuffer(data, dtype=x.dtype).view(shape)) if data else x


def compute(function: Any, rank: int) -> dict[str, Tensor]:
    """Return the outputs of `function` on a rank. Its inputs are made again for each call, since it may write into
    them.
    """
    with torch.no_grad():
        found: dict[str, Tensor] = function(**{name: make_input(name, rank) for name in INPUTS})
    return found


def bytes_of(x: Tensor) -> Tensor:
    """Return the bytes of a tensor in row-major order, of shape (number of elements, bytes of an element)."""
    return x.contiguous().as_strided((x.numel(), 1), (1, 1)).view(torch.uint8)


def describe_difference(first: Tensor, second: Tensor) -> str | None:
    """Return the difference of two tensors in dtype, shape or bits, in words; None if they are equal."""
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return f"{first.dtype} {tuple(first.shape)} against {second.dtype} {tuple(second.shape)}"
    a, b = bytes_of(first), bytes_of(second)
    places = (a != b).any(1).nonzero().flatten().tolist()
    if not places:
        return None
    numbers = ["0x" + bytes(reversed(x[places[0]].tolist())).hex() for x in (a, b)]
    return f"{len(places)} of {len(a)} elements differ; element {places[0]} is {numbers[0]} against {numbers[1]}"


def differs_on(rank: int) -> bool:
    """Compute the reference and the candidate on a rank, print their differences, and return whether there are any."""
    first, second = compute(reference, rank), compute(candidate, rank)
    found = {name: describe_difference(first[name], second[name]) for name in first}
    for name, difference in found.items():
        if difference:
            os.write(1, f"rank {rank}: {name}: {difference}\n".encode())
    return any(found.values())


def run_rank(rank: int, folder: str) -> None:
    """Run a rank: join its groups, and compare. Exits the process with 0 if equal, 1 if different, 2 after an error."""
    try:
        store = dist.FileStore(os.path.join(folder, "store"), WORLD_SIZE)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE)
        joined: list[Any] = []  # torch's registry holds groups by weak references alone
        for name, parts in GROUPS.items():
            groups = [dist.new_group(ranks) for ranks in parts]
            joined.append(wrap_group(next(g for g, ranks in zip(groups, parts, strict=True) if rank in ranks)))
            torch._C._distributed_c10d._register_process_group(name, joined[-1])  # type: ignore[arg-type]
        differs = differs_on(rank)
        dist.barrier()
        os._exit(int(differs))
    except BaseException:
        os.write(1, traceback.format_exc().encode())
        os._exit(2)


def compare_alone() -> int:
    """Compare all ranks in this process, without collectives. Returns 0 if equal, 1 if different, 2 after an error."""
    try:
        return print_status(max(int(differs_on(rank)) for rank in range(WORLD_SIZE)))
    except Exception:
        os.write(1, traceback.format_exc().encode())
        return print_status(2)


def compare_together() -> int:
    """Compare, with a process for each rank. Returns 0 if equal, 1 if different, 2 if a rank fails."""
    with tempfile.TemporaryDirectory() as folder:
        fork = multiprocessing.get_context("fork")
        ranks = [fork.Process(target=run_rank, args=(rank, folder), daemon=True) for rank in range(WORLD_SIZE)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(120)
    return print_status(max(rank.exitcode if rank.exitcode in (0, 1) else 2 for rank in ranks))


def print_status(status: int) -> int:
    """Print the meaning of an exit status, and return it."""
    print(("reference and candidate agree in every bit", "reference and candidate differ", "a rank failed")[status])
    return status
