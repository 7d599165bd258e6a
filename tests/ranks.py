"""Run a function on several real ranks: forked processes, joined by gloo, or in shared memory."""

from __future__ import annotations

import json
import os
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bitproof.harness.case import Parallelism
from bitproof.harness.shared_memory import SharedMemory
from bitproof.harness.torch_compat import import_tracing
from bitproof.reference.parallel.mesh import Mesh, join_groups, leave_groups


def on_ranks(parallelism: Parallelism, body: Callable[[Mesh], Any], *, collectives: str = "gloo") -> list[Any]:
    """What `body(mesh)` returns (JSON values) on every rank, in rank order. A failing rank fails the test."""
    import_tracing()  # a rank that builds a model would import it anew, for a second
    memory = SharedMemory(parallelism.world_size) if collectives == "shared" else None
    with tempfile.TemporaryDirectory() as folder:
        pids = {rank: _fork(rank, parallelism, body, Path(folder), memory) for rank in range(parallelism.world_size)}
        for pid in pids.values():
            os.waitpid(pid, 0)
        answers = [json.loads((Path(folder) / f"answer{rank}").read_text()) for rank in pids]
    failures = [answer["error"] for answer in answers if "error" in answer]
    assert not failures, "\n".join(failures)
    return [answer["result"] for answer in answers]


def _fork(
    rank: int, parallelism: Parallelism, body: Callable[[Mesh], Any], folder: Path, memory: SharedMemory | None
) -> int:
    if pid := os.fork():
        return pid
    torch.set_num_threads(1)
    mesh = Mesh(rank, parallelism)
    try:
        store = dist.FileStore(str(folder / "store"), parallelism.world_size)
        join_groups(mesh, torch.device("cpu"), store, backend="gloo", timeout=60.0, memory=memory)
        answer = {"result": body(mesh)}
        if dist.is_initialized():
            dist.barrier()  # a rank that left early would look to the others like one that died
        leave_groups()
    except BaseException:
        answer = {"error": f"rank {rank}:\n{traceback.format_exc()}"}
    (folder / f"answer{rank}").write_text(json.dumps(answer))
    os._exit(0)
