"""A table of the checks of `doctor --gpu`, in order: for each check, its claim and the meaning of a failure.

This module does not load torch. A test compares the table with the page `docs/explanation/gpus.md`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["alone", "together", "rank", "case"]


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A planned GPU check.

    - `kind`: the scope of the check. "alone": a single device. "together": all ranks. "rank": a case in which a rank
      fails on purpose. "case": the case with the check's name.
    - `seconds`: a generous estimate, far above the time on an H100.
    - `shows`: the check's claim.
    - `means`: the meaning of a failure.
    - `then`: the first thing to do after a failure.
    """

    kind: Kind
    seconds: int
    shows: str
    means: str
    then: str


def _alone(seconds: int, shows: str, means: str, then: str) -> Planned:
    return Planned(kind="alone", seconds=seconds, shows=shows, means=means, then=then)


def _together(seconds: int, shows: str, means: str, then: str) -> Planned:
    return Planned(kind="together", seconds=seconds, shows=shows, means=means, then=then)


def _rank(seconds: int, shows: str, means: str, then: str) -> Planned:
    return Planned(kind="rank", seconds=seconds, shows=shows, means=means, then=then)


def _case(seconds: int, shows: str, means: str, then: str = "read its report as on a CPU") -> Planned:
    return Planned(kind="case", seconds=seconds, shows=shows, means=means, then=then)


KILLED, HUNG = "a killed rank", "a hung rank"

GPU_CHECKS: dict[str, Planned] = {
    "topology": _alone(
        20,
        "all GPUs are of one kind",
        "ranks get different kernels, and no two of them the same bits",
        "leave the other GPU out with CUDA_VISIBLE_DEVICES",
    ),
    "digests": _alone(
        60,
        "320 layouts have the CPU's digest, and one changed element is seen",
        "recordings of this machine say nothing",
        "read `harness/capture/xxh3_kernel.py`; try nothing else before",
    ),
    "attention": _alone(
        30,
        "attention and its backward repeat themselves, by no kernel of cuDNN",
        "cases with attention are NONDETERMINISTIC",
        "its line has the kernel of each dtype and head dim",
    ),
    "grouped products": _alone(
        20,
        "grouped products and their backward repeat themselves, and have the values of products one by one",
        "cases with experts cannot be EQUAL",
        "try another release of torch",
    ),
    "rows without tokens": _alone(
        20,
        "experts without rows get gradients of zero, from memory that held NaN",
        "cases with experts are noise as soon as one of these is idle",
        "try another release of torch",
    ),
    "offload": _alone(
        30,
        "what was offloaded comes back with its bits, in seven ways in which one stream lags behind another",
        "cases that offload are noise",
        "its line names the way: each needs one guard of `harness/graph/offload_operators.py`",
    ),
    "digest bandwidth": _alone(
        20,
        "a digest reads at 5% or more of what a copy moves",
        "runs are slow; verdicts are right",
        "go on",
    ),
    "repeatability": _alone(
        60,
        "processes compute the same bits: one a GPU, started twice",
        "recordings of two runs cannot be compared",
        "its line names the kind of call; look for that operator's algorithms",
    ),
    "NCCL": _together(
        60,
        "ranks join over one version of NCCL, and each group has its ranks in order",
        "nothing with several ranks can be trusted",
        "`NCCL_DEBUG=INFO bitproof doctor --gpu` shows what NCCL found",
    ),
    "sums in rank order": _together(
        90,
        "fused and separate sums agree, from 4 KiB to 64 MiB, and are in rank order",
        "no case with buckets can be trusted",
        "its line says what added; without Triton installed additions take the kernel's place",
    ),
    "sums by parts": _together(
        60,
        "a sum of a large tensor, taken in parts by all ranks, is in rank order",
        "gradients of more than 64 MiB over all ranks cannot be trusted",
        "its line has the dtype and the size",
    ),
    "all-to-all": _together(
        60,
        "every row arrives where it was sent, with uneven and empty parts",
        "cases with experts cannot be EQUAL",
        "try `NCCL_PROTO=Simple`, then `NCCL_P2P_DISABLE=1`",
    ),
    "two groups at once": _together(
        60,
        "collectives of two groups are in flight at once, launched in one order on all ranks",
        "cases that isolate groups or overlap may hang or be wrong",
        "see that NCCL is 2.26 or newer and NCCL_LAUNCH_ORDER_IMPLICIT is 1",
    ),
    "native sums": _together(
        60,
        "NCCL's own sums agree fused and separate, and repeat themselves",
        "`--collectives native` may be DIFFERENT where nothing is wrong; the default is not affected",
        "go on without that option",
    ),
    "native order": _together(
        60,
        "NCCL's own sums are off those in rank order by rounding at most; how many are is counted",
        "NCCL adds wrongly: the default, which only has it move bits, may be right",
        "try another release of NCCL",
    ),
    KILLED: _rank(
        120,
        "a rank that is killed is named, with the signal",
        "a crash on this machine may name no rank, or a wrong one",
        "see the logs that the line names",
    ),
    HUNG: _rank(
        120,
        "of a rank that hangs, what ranks did last shows that it holds up the others",
        "a hang on this machine may name no rank, or a wrong one",
        "see the logs that the line names",
    ),
    "transformer_batch": _case(240, "EQUAL on all GPUs over NCCL", "no other case is worth running"),
    "moe_batch": _case(240, "EQUAL on all GPUs over NCCL", "no other case with experts is worth running"),
    "moe_seq": _case(240, "EQUAL on all GPUs over NCCL", "no other case with experts is worth running"),
    "experts_seq_idle_experts": _case(150, "experts without tokens, in a step", "cases with idle experts are noise"),
    "isolate_distinct": _case(150, "all-to-alls in a group of their own", "cases that isolate groups are wrong"),
    "blocks_batch_bucketed_float32": _case(
        150, "buckets, where the order of a sum shows", "cases with buckets are wrong"
    ),
    "experts_seq_overlap": _case(150, "all-to-alls behind the other chunk's compute", "cases that overlap are wrong"),
    "blocks_batch_offload": _case(150, "activations in host memory, in a step", "cases that offload are wrong"),
    "pipeline_interleaved": _case(
        150, "activations and gradients sent between stages over NCCL", "pipelines are wrong"
    ),
    "captured_experts_seq": _case(
        180, "a step captured as a CUDA graph on every rank, collectives included", "captured cases are wrong or hang"
    ),
    "precompiled_experts_seq": _case(
        180, "a step that two ranks traced, run by all others, each on its own GPU", "precompiled cases are wrong"
    ),
    "experts_seq_flex": _case(150, "FlexAttention in chunks", "cases with FlexAttention are wrong"),
    "joint_llama3_fsdp4_tp2": _case(150, "a step that torch exports, on two dims of ranks", "joint cases are wrong"),
    "experts_seq_regional": _case(180, "modules compiled by Inductor, on two ranks", "regional cases are wrong"),
    "regional_inductor": _case(
        240,
        "FlexAttention compiled by Inductor",
        "its bound is a guess for GPUs: only larger differences than its own mean anything",
        "send the line home",
    ),
}


def names_of(*kinds: Kind) -> tuple[str, ...]:
    return tuple(name for name, planned in GPU_CHECKS.items() if planned.kind in kinds)


def minutes(names: tuple[str, ...] = (*GPU_CHECKS,)) -> int:
    return round(sum(GPU_CHECKS[name].seconds for name in names) / 60)
