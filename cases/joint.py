"""The step exported as torch's joint graph and partitioned into forward and backward, against eager.

FSDP goes with tensor parallelism (Llama 3) and with expert parallelism (DeepSeek-V3).
"""

from __future__ import annotations

from dataclasses import replace

from cases.chunking import unchunked
from harness.case import JOINT, Model, Parallelism, Pipeline

FAMILY = "joint"

_llama3 = replace(
    unchunked,
    family=FAMILY,
    candidate=JOINT,
    model=Model(family="llama3"),
    pipeline=Pipeline(bucket=True),
)
joint_llama3_fsdp2_tp4 = replace(_llama3, name="joint_llama3_fsdp2_tp4", parallelism=Parallelism(ep=1, tp=4))
joint_llama3_fsdp4_tp2 = replace(_llama3, name="joint_llama3_fsdp4_tp2", parallelism=Parallelism(ep=1, tp=2))

CASES = (joint_llama3_fsdp2_tp4, joint_llama3_fsdp4_tp2)
