"""What is refused of a case's model before any rank starts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bitproof.builtin_cases.tp_ep import tp_ep_shared
from bitproof.harness.case import Batch, Chunking, Model, Parallelism
from bitproof.harness.errors import CaseError, ChunkError, MachineError
from bitproof.harness.execute.host.models import check_model
from bitproof.reference.parallel.mesh import Mesh
from bitproof.reference.step import build_sharded_model
from tests.small import small

CASE = replace(small(tp_ep_shared), parallelism=Parallelism(world_size=2, tp=2, ep=2))


def test_tensor_ranks_that_divide_the_tokens_pass_and_others_are_refused() -> None:
    check_model(replace(CASE, batch=Batch(sequences=1, seq_len=6)), "eager")
    odd = replace(CASE, batch=Batch(sequences=1, seq_len=7))
    with pytest.raises(CaseError) as error:
        check_model(odd, "eager")
    assert str(error.value) == (
        "CaseError: layers.0.moe does not split evenly over tensor-parallel ranks\n"
        "  expected: tokens a call a multiple of tp=2\n"
        "  found: 7 tokens a call\n"
        "  fix: choose a tp that divides them"
    )
    with pytest.raises(CaseError, match="7 tokens a call"):  # each time it is asked
        check_model(odd, "eager")


def test_what_tracing_refuses_and_what_a_user_s_system_does_is_not_looked_at() -> None:
    unknown = replace(CASE, model=Model(flavor="none"))
    with pytest.raises(CaseError, match="unknown flavor"):
        check_model(unknown, "eager_chunked")
    check_model(unknown, "graph")
    check_model(unknown, "mine.py:factory")


def test_ranks_that_find_no_memory_for_their_state_are_refused_and_those_that_do_are_not() -> None:
    model = build_sharded_model(CASE, Mesh(0, CASE.parallelism), torch.device("meta"))
    parameters = sum(x.nbytes for x in model.parameters())
    check_model(CASE, "eager", num_ranks=2, memory=2 * 4 * parameters)
    check_model(CASE, "eager", num_ranks=2)
    with pytest.raises(MachineError, match="the ranks of case tp_ep_shared find no memory for their state") as error:
        check_model(CASE, "eager", num_ranks=2, memory=2 * 4 * parameters - 1)
    assert "GiB for parameters, gradients and moments of 2 ranks\n  found: 0.0 GiB that are free" in str(error.value)


@pytest.mark.parametrize(
    ("chunking", "what"),
    [
        (Chunking(dim="seq", modules="layers.*"), "cannot chunk layers.0 along the sequence: it takes positions_BS, "),
        (Chunking(dim="batch", modules="layers.*.mo"), "the chunking pattern 'layers.*.mo' matches no module"),
        (
            Chunking(dim="batch", modules="layers.*.moe.shared_experts"),
            "cannot chunk layers.0.moe.shared_experts: layers.0.moe gives it rows of tokens",
        ),
    ],
)
def test_a_model_that_cannot_be_chunked_as_the_case_says_is_refused_before_any_rank_starts(chunking, what) -> None:
    with pytest.raises(ChunkError) as error:
        check_model(replace(CASE, chunking=chunking), "eager")
    assert error.value.what.startswith(what)
    check_model(replace(CASE, chunking=replace(chunking, dim="batch", modules="layers.*.moe")), "eager")
