"""The step exported as torch's joint graph and partitioned into forward and backward, against eager.

FSDP goes with tensor parallelism (Llama 3) and with expert parallelism (DeepSeek-V3).
"""

from __future__ import annotations

from dataclasses import replace

from cases.chunking import unchunked
from harness.case import JOINT, Batch, Model, Parallelism, Pipeline

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


_flex = {"model": Model(family="llama3", attention="flex"), "batch": Batch(data="pydoc_lines"), "steps": 5}
joint_llama3_flex_fsdp2_tp4 = replace(joint_llama3_fsdp2_tp4, name="joint_llama3_flex_fsdp2_tp4", **_flex)
joint_llama3_flex_fsdp4_tp2 = replace(joint_llama3_fsdp4_tp2, name="joint_llama3_flex_fsdp4_tp2", **_flex)

_deepseek = replace(_llama3, model=Model())
joint_deepseek_ep2 = replace(_deepseek, name="joint_deepseek_ep2", parallelism=Parallelism(ep=2))
joint_deepseek_ep4 = replace(_deepseek, name="joint_deepseek_ep4", parallelism=Parallelism(ep=4))

CASES = (
    joint_llama3_fsdp2_tp4,
    joint_llama3_fsdp4_tp2,
    joint_llama3_flex_fsdp2_tp4,
    joint_llama3_flex_fsdp4_tp2,
    joint_deepseek_ep2,
    joint_deepseek_ep4,
)
