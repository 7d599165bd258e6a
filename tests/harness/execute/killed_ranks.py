"""Ranks that torchrun starts, train, save into the folder that is named, and are killed (SIGKILL) at once."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from bitproof.builtin_cases.examples import resumed_loop
from bitproof.builtin_cases.layouts import resume
from bitproof.harness.case import Parallelism

if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    case = replace(resume.resume_fsdp, parallelism=Parallelism(world_size=dist.get_world_size(), ep=1))
    mesh: Any = SimpleNamespace(rank=dist.get_rank())
    loop = resumed_loop.fsdp(case, mesh)
    for step in range(2):
        for _ in loop.step(step):
            pass
    loop.save(Path(sys.argv[1]))
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)
