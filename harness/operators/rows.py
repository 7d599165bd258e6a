"""The table of operators, `ROWS`: rows by name. `harness.operators.row` explains the columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bitproof.harness.operators.aten import ATEN
from bitproof.harness.operators.row import Hides, Launch, Operator, RowFlow, Sync, Uninitialized, Wait, Work

_COLLECTIVE = Launch(work=Work.COLLECTIVE)
# A send fills no result, so a wait for the sent tensor ends it.
_MESSAGE = Launch(work=Work.COLLECTIVE, awaited_by_source=True)


def _fills(argument: str) -> Mapping[str, Any]:
    return {"writes": argument, "returns": argument}


_WHOLE, _GROWN = Uninitialized.WHOLE, Uninitialized.GROWN

_ROWS = (
    *ATEN,
    Operator(name="_c10d_functional.*", launch=_COLLECTIVE),
    Operator(name="_c10d_functional._wrap_tensor_autograd", launch=_COLLECTIVE, is_identity=True),
    Operator(
        name="_c10d_functional.all_gather_into_tensor",
        launch=_COLLECTIVE,
        rows=RowFlow.ALL_GATHER,
        is_understood=True,
        allowed=("default",),
    ),
    Operator(
        name="_c10d_functional.all_reduce",
        launch=_COLLECTIVE,
        sums_ranks=True,
        rows=RowFlow.ELEMENTWISE,
        is_understood=True,
        allowed=("default",),
    ),
    Operator(name="_c10d_functional.all_reduce_coalesced", launch=_COLLECTIVE, sums_ranks=True),
    Operator(
        name="_c10d_functional.all_to_all_single",
        launch=_COLLECTIVE,
        exchanges=True,
        rows=RowFlow.ALL_TO_ALL,
        num_elements=1,
        is_understood=True,
        allowed=("default",),
    ),
    Operator(name="_c10d_functional.batch_p2p_ops", launch=_MESSAGE, returns="tensors", pairs_ranks=True),
    Operator(name="_c10d_functional.irecv", launch=_COLLECTIVE, writes="tensor", returns="tensor", pairs_ranks=True),
    Operator(name="_c10d_functional.isend", launch=_MESSAGE, returns="tensor", pairs_ranks=True),
    Operator(
        name="_c10d_functional.reduce_scatter_tensor",
        launch=_COLLECTIVE,
        sums_ranks=True,
        rows=RowFlow.REDUCE_SCATTER,
        is_understood=True,
        allowed=("default",),
    ),
    Operator(name="_c10d_functional.reduce_scatter_tensor_coalesced", launch=_COLLECTIVE, sums_ranks=True),
    Operator(
        name="_c10d_functional.wait_tensor",
        wait=Wait(work=Work.COLLECTIVE, argument="tensor"),
        returns="tensor",
        rows=RowFlow.ELEMENTWISE,
        allowed=("default",),
    ),
    Operator(name="_c10d_functional_autograd.*", launch=_COLLECTIVE),
    # torch's own collectives: their schemas do not state that they write, and a `Work` waits for them.
    Operator(name="c10d._allgather_base_", launch=_COLLECTIVE, **_fills("output_tensor")),
    Operator(name="c10d._reduce_scatter_base_", launch=_COLLECTIVE, **_fills("output_tensor"), sums_ranks=True),
    Operator(name="c10d.allgather_", launch=_COLLECTIVE, **_fills("output_tensors")),
    Operator(name="c10d.allgather_coalesced_", launch=_COLLECTIVE, **_fills("output_lists")),
    Operator(name="c10d.allgather_into_tensor_coalesced_", launch=_COLLECTIVE, **_fills("outputs")),
    Operator(name="c10d.allreduce_", launch=_COLLECTIVE, **_fills("tensors"), sums_ranks=True),
    Operator(name="c10d.allreduce_coalesced_", launch=_COLLECTIVE, **_fills("tensors"), sums_ranks=True),
    Operator(name="c10d.alltoall_", launch=_COLLECTIVE, **_fills("output_tensors"), exchanges=True),
    Operator(name="c10d.alltoall_base_", launch=_COLLECTIVE, **_fills("output"), exchanges=True),
    Operator(name="c10d.barrier", launch=_COLLECTIVE),
    Operator(name="c10d.broadcast_", launch=_COLLECTIVE, **_fills("tensors")),
    Operator(name="c10d.gather_", launch=_COLLECTIVE, **_fills("output_tensors")),
    Operator(name="c10d.recv_", launch=_COLLECTIVE, **_fills("tensors"), pairs_ranks=True),
    Operator(name="c10d.recv_any_source_", launch=_COLLECTIVE, **_fills("tensors"), pairs_ranks=True),
    Operator(name="c10d.reduce_", launch=_COLLECTIVE, **_fills("tensors"), sums_ranks=True),
    Operator(name="c10d.reduce_scatter_", launch=_COLLECTIVE, **_fills("output_tensors"), sums_ranks=True),
    Operator(name="c10d.reduce_scatter_tensor_coalesced_", launch=_COLLECTIVE, **_fills("outputs"), sums_ranks=True),
    Operator(name="c10d.scatter_", launch=_COLLECTIVE, **_fills("output_tensors")),
    Operator(name="c10d.send", launch=_COLLECTIVE, pairs_ranks=True),
    Operator(name="_operator.getitem", hides=Hides.CHOICE),
    # torch's own offloading of activations. The same operator waits for copies in both directions.
    Operator(name="ao.offload", launch=Launch(work=Work.TRANSFER, takes="copies", holds_source=True)),
    Operator(name="ao.reload", launch=Launch(work=Work.TRANSFER, takes="copies", holds_source=True)),
    Operator(
        name="ao.wait_tensor",
        wait=Wait(work=Work.TRANSFER, argument="tensor"),
        returns="tensor",
        frees="keepalive",
    ),
    Operator(
        name="bitproof.offload",
        launch=Launch(work=Work.OFFLOAD, takes="copies", holds_source=True),
        copies="x",
        rows=RowFlow.ELEMENTWISE,
        allowed=("default",),
    ),
    Operator(
        name="bitproof.reload",
        launch=Launch(work=Work.RELOAD, takes="copies"),
        copies="host",
        rows=RowFlow.ELEMENTWISE,
        allowed=("default",),
    ),
    Operator(
        name="bitproof.wait_offload",
        wait=Wait(work=Work.OFFLOAD, argument="host"),
        returns="host",
        rows=RowFlow.ELEMENTWISE,
        allowed=("default",),
    ),
    Operator(
        name="bitproof.wait_reload",
        wait=Wait(work=Work.RELOAD, argument="x"),
        returns="x",
        rows=RowFlow.ELEMENTWISE,
        allowed=("default",),
    ),
    Operator(
        name="higher_order.flex_attention", attends=True, rows=RowFlow.EACH_OF_BATCH, is_understood=True, allowed=("",)
    ),
    Operator(name="higher_order.flex_attention_backward", is_understood=True, allowed=("",)),
    Operator(name="higher_order.graphsafe_run_with_rng_state", runs_operator=True),
    Operator(name="higher_order.run_and_save_rng_state", runs_operator=True),
    Operator(name="higher_order.run_with_rng_state", runs_operator=True),
    Operator(name="higher_order.triton_kernel_wrapper_mutation", writes="kwargs"),
    Operator(name="higher_order.with_effects", runs_operator=True),
    Operator(name="inductor.resize_storage_bytes_", writes="variable"),
    Operator(name="prims.empty", uninitialized=_WHOLE),
    Operator(name="prims.empty_permuted", uninitialized=_WHOLE),
    Operator(name="prims.empty_strided", uninitialized=_WHOLE),
    Operator(name="prims.inductor_rand_eager_offset", uninitialized=_WHOLE),  # a placeholder, replaced by Inductor
    Operator(name="prims.inductor_randint", draws_untagged=True),
    Operator(name="prims.inductor_random", draws_untagged=True),
    Operator(name="prims.resize", uninitialized=_GROWN),
    Operator(name="streams.fork", sync=Sync.SWITCH),
    Operator(name="streams.join", sync=Sync.SWITCH),
    Operator(name="streams.record_event", sync=Sync.RECORD),
    Operator(name="streams.record_stream", sync=Sync.KEEP, reads_layout=True),
    Operator(name="streams.sync_dealloc", sync=Sync.WAIT_EVENT, reads_layout=True),
    Operator(name="streams.synchronize_device", sync=Sync.HOST_WAITS),
    Operator(name="streams.synchronize_event", sync=Sync.HOST_WAITS_EVENT),
    Operator(name="streams.synchronize_stream", sync=Sync.HOST_WAITS_STREAM),
    Operator(name="streams.wait_event", sync=Sync.WAIT_EVENT),
    Operator(name="streams.wait_stream", sync=Sync.WAIT_STREAM),
    Operator(
        name="torch.distributed._functional_collectives.wait_tensor",
        wait=Wait(work=Work.COLLECTIVE, argument="tensor"),
        returns="tensor",
    ),
)

ROWS: dict[str, Operator] = {row.name: row for row in _ROWS}
assert len(ROWS) == len(_ROWS), "an operator has one row"
