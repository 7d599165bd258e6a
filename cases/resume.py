"""A run that never stopped, against one that saved, ended, and went on in new processes: every bit.

What is saved goes through torch.distributed.checkpoint: parameters, optimizer, learning rate, the generator of the
data. On other ranks than it was saved on, what was loaded is compared by logical tensor.
"""

from __future__ import annotations

from dataclasses import replace

from bitproof.builtin_cases.two_layouts import ddp_fsdp, fsdp_tp

FAMILY = "resume"
_LOOP = "bitproof.builtin_cases.examples.mesh_loop"

resume_fsdp = replace(
    ddp_fsdp,
    name="resume_fsdp",
    family=FAMILY,
    reference=f"{_LOOP}:fsdp",
    steps=4,
    reference_parallelism=None,
    resume_at=2,
)
resume_ddp = replace(resume_fsdp, name="resume_ddp", reference=f"{_LOOP}:ddp", candidate=f"{_LOOP}:ddp")
resume_tp = replace(
    fsdp_tp,
    name="resume_tp",
    family=FAMILY,
    reference=f"{_LOOP}:fsdp_tp",
    steps=4,
    parallelism=replace(fsdp_tp.parallelism, world_size=4),
    reference_parallelism=None,
    resume_at=2,
    expected="EQUAL",
)

CASES = (resume_fsdp, resume_ddp, resume_tp)
