"""Define how a step is divided into micro-batches and pipeline stages, and refuse unsupported divisions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from bitproof.harness.case.bounds import Bounds
from bitproof.harness.case.stage_map import StageMap
from bitproof.harness.case.traced import COMPILED, GRAPH, PREPARED
from bitproof.harness.errors import CaseError
from bitproof.harness.validate import STRICT

if TYPE_CHECKING:
    from bitproof.harness.case.case import Case

Order = Literal["gpipe", "1f1b", "zero_bubble", "zbv", "dual_pipe_v"]
_ORDERS: tuple[Order, ...] = get_args(Order)
_V_ORDERS = ("zbv", "dual_pipe_v")

_MICRO_BATCHES = Bounds(1, 4096)
_STAGES = Bounds(1, 256)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Divides a training step into micro-batches, and a model into pipeline stages.

    - `micro_batches`: the number of equal parts of a rank's rows. Their gradients are added in the rows' order.
    - `order`: "gpipe" runs all forwards, then all backwards. "1f1b" alternates them as soon as the pipeline is full,
      interleaved if a rank has several stages. "zero_bubble" is 1f1b with each backward divided: the gradients of
      weights come later than that of the stage's input, when a rank would otherwise wait. "zbv" (ZB-V) and
      "dual_pipe_v" (DualPipeV) divide backwards, too, and place the two stages of each rank in a V: "zbv" keeps each
      rank busy, "dual_pipe_v" puts a forward beside the backward of another micro-batch.
    - `stages_per_rank`: with `pp` pipeline ranks there are pp * `stages_per_rank` stages. Stage s is on the ranks with
      pipeline coordinate s % pp, or in a V with the coordinate that `StageMap` states.
    - `tied`: the first stage's embeddings and the last stage's projection to logits have the same values. Each of the
      two stages stores these values, and adds up the gradients of both.
    - `shared`: two modules whose parameters are shared in the same way. The first module is in an earlier stage.
    - `gathers_once`: parameters are gathered once a step, for all micro-batches.
    - `reductions_once`: each rank adds its gradients over micro-batches, in order and in the dtype of the reduction,
      and the sums are reduced over ranks once a step. By default each micro-batch's gradients are reduced, then added.
    """

    __pydantic_config__ = STRICT

    micro_batches: int = 4
    order: Order = "1f1b"
    stages_per_rank: int = 1
    tied: bool = False
    shared: tuple[str, str] | None = None
    gathers_once: bool = False
    reductions_once: bool = False

    def __post_init__(self) -> None:
        _MICRO_BATCHES.check("schedule.micro_batches", self.micro_batches)
        _STAGES.check("schedule.stages_per_rank", self.stages_per_rank)
        if self.order not in _ORDERS:
            raise CaseError(
                "unknown order of a schedule",
                expected=f"{', '.join(_ORDERS[:-1])} or {_ORDERS[-1]}",
                found=f"order={self.order!r}",
            )

    @property
    def divides_backward(self) -> bool:
        """Whether a backward has two parts: the gradient of the stage's input, and those of weights."""
        return self.order not in ("gpipe", "1f1b")

    def stage_map(self, num_ranks: int) -> StageMap:
        """Return the ranks of all stages, in a pipeline of `num_ranks` ranks."""
        return StageMap(num_ranks, self.stages_per_rank, is_v=self.order in _V_ORDERS)


def stage_of_layer(layer: int, num_layers: int, num_stages: int) -> int:
    """Return the stage of a layer. Stages have consecutive layers, and nearly equal numbers of them.

    Example: with 5 layers in 2 stages, stage 0 has layers 0 to 2.
    """
    return layer * num_stages // num_layers


def check_schedule(case: Case) -> None:
    pp, schedule = case.parallelism.pp, case.schedule
    if schedule is None:
        if pp > 1:
            raise CaseError(
                f"case {case.name} has a pipeline and does not say what goes through it",
                expected="schedule=Schedule(micro_batches=...) with parallelism.pp > 1",
                found=f"parallelism.pp={pp}, schedule=None",
            )
        return
    rows, count = case.batch.sequences, schedule.micro_batches
    # Each micro-batch is chunked separately, along its own rows.
    of_chunks = 2 if case.chunking is not None and case.chunking.dim == "batch" else 1
    if rows % (count * of_chunks):
        raise CaseError(
            f"case {case.name} cannot be cut into micro-batches of equal size",
            expected=f"batch.sequences a multiple of {count * of_chunks}: {count} micro-batches"
            + (" of two chunks each" if of_chunks > 1 else ""),
            found=f"batch.sequences={rows}",
        )
    # The flavor's number of layers, if the case states none, is checked when the model is made.
    if pp > 1 and case.model.layers is not None and case.model.layers < case.stages:
        raise CaseError(
            f"case {case.name} has more stages than layers",
            expected=f"model.layers of at least {case.stages}, one for each stage",
            found=f"model.layers={case.model.layers}",
        )
    if (schedule.tied or schedule.shared) and pp == 1:
        raise CaseError(
            f"case {case.name} ties parameters of two stages, and has no stages",
            expected="tied=False and shared=None, or parallelism.pp > 1",
            found=f"tied={schedule.tied}, shared={schedule.shared}, parallelism.pp={pp}",
        )
    _check_order(case, schedule)
    if schedule.reductions_once and case.chunking is not None:
        raise CaseError(
            f"case {case.name} reduces gradients once a step, and those of each chunk separately",
            expected="reductions_once=False, or no chunks: a chunk's gradients are reduced, then added",
            found=f"chunking={case.chunking!r}",
        )
    _check_systems(case)


def _check_order(case: Case, schedule: Schedule) -> None:
    pp, count, is_v = case.parallelism.pp, schedule.micro_batches, schedule.order in _V_ORDERS
    if is_v and (pp == 1 or schedule.stages_per_rank != 2):
        raise CaseError(
            f"case {case.name} asks for a V, which has two stages on each rank of a pipeline",
            expected=f"stages_per_rank=2 and parallelism.pp > 1 with order={schedule.order!r}",
            found=f"stages_per_rank={schedule.stages_per_rank}, parallelism.pp={pp}",
        )
    least, of = (case.stages, "stage") if is_v else (pp, "rank")
    if schedule.order != "gpipe" and count < least:
        raise CaseError(
            f"case {case.name} has too few micro-batches to fill its pipeline",
            expected=f"schedule.micro_batches of at least {least}, one for each {of} of the pipeline, or order='gpipe'",
            found=f"schedule.micro_batches={count}",
        )
    if schedule.stages_per_rank > 1 and not is_v and (pp == 1 or count % pp or schedule.order == "gpipe"):
        raise CaseError(
            f"case {case.name} gives ranks several stages in a way that has no order",
            expected="order='1f1b' or 'zero_bubble', parallelism.pp > 1, and a multiple of it as "
            "schedule.micro_batches",
            found=f"order={schedule.order!r}, parallelism.pp={pp}, schedule.micro_batches={count}",
        )


def _check_systems(case: Case) -> None:
    systems = {case.reference, case.candidate}
    # `graph` is the prepared system that supports micro-batches.
    others = sorted(name for name in systems & {*PREPARED, COMPILED} if name != GRAPH)
    refused = {
        f"the system {others[0] if others else ''}": bool(others),
        "autoplace": case.autoplace is not None,
        "observe": bool(case.observe),
        "pipeline.backend": case.pipeline.compiles or case.pipeline.captures,
        "grad_norm": case.grad_norm and case.parallelism.pp > 1,
        "model.attention='flex'": case.model.attention == "flex" and case.parallelism.pp > 1,
        "model.loss_pieces": case.model.loss_pieces > 1 and case.parallelism.pp > 1,
        "resume_at": case.resume_at is not None,
    }
    if found := [name for name, is_set in refused.items() if is_set]:
        raise CaseError(
            f"case {case.name} asks a step in micro-batches for what it does not do",
            expected="the systems eager, eager_chunked and graph, its backend fx; no observed activations; in a "
            "pipeline neither the norm of all gradients nor masks of documents, and the loss in one piece",
            found=", ".join(found),
            fix="leave it out",
        )
