"""Cases that compare an uninterrupted run with a run that saved, was killed, and resumed in new processes.

Every bit must agree. If another layout of ranks resumes, every bit of the loaded state must agree. Its later steps are
compared as whole tensors, joined from the ranks' parts.
"""

from __future__ import annotations

from dataclasses import replace

from bitproof.builtin_cases.layouts.two_layouts import ddp_fsdp, fsdp_tp
from bitproof.harness.case import Parallelism

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
# Two steps, and modules' outputs.
resume_observed = replace(
    resume_fsdp, name="resume_observed", steps=2, resume_at=1, observe=("embedding", "blocks.*", "output")
)

_ALL = "bitproof.builtin_cases.examples.resumed_loop"
_FOUR = Parallelism(world_size=4, ep=1)

resume_dropout = replace(
    resume_fsdp,
    name="resume_dropout",
    reference=f"{_ALL}:fsdp",
    candidate=f"{_ALL}:fsdp",
    parallelism=_FOUR,
    options={"dropout": 0.1},
)
fsdp_then_ddp = replace(
    resume_fsdp,
    name="fsdp_then_ddp",
    reference=f"{_ALL}:fsdp",
    candidate=f"{_ALL}:ddp",
    reference_parallelism=resume_fsdp.parallelism,
    resumes_reference=True,
)
fsdp_then_hsdp = replace(
    fsdp_then_ddp,
    name="fsdp_then_hsdp",
    candidate=f"{_ALL}:hsdp",
    parallelism=_FOUR,
    reference_parallelism=_FOUR,
    expected="CLOSE",
)
fsdp_then_tp = replace(
    fsdp_then_hsdp, name="fsdp_then_tp", candidate=f"{_ALL}:fsdp_tp", parallelism=replace(_FOUR, tp=2)
)
# Other numbers of ranks: the loaded state, and all later steps, are compared.
fsdp_four_then_two = replace(
    fsdp_then_hsdp, name="fsdp_four_then_two", candidate=f"{_ALL}:ddp", parallelism=replace(_FOUR, world_size=2)
)
fsdp_two_then_four = replace(
    fsdp_then_hsdp,
    name="fsdp_two_then_four",
    candidate=f"{_ALL}:fsdp",
    reference_parallelism=resume_fsdp.parallelism,
)

CASES = (
    resume_fsdp,
    resume_ddp,
    resume_tp,
    resume_observed,
    resume_dropout,
    fsdp_then_ddp,
    fsdp_then_hsdp,
    fsdp_then_tp,
    fsdp_four_then_two,
    fsdp_two_then_four,
)
