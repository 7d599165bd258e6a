import pytest
import torch

from bitproof.harness.powers.proofs.prover.answers import prove_graphs
from bitproof.harness.powers.proofs.prover.evaluate import (
    Evaluator,
    NotEvaluatedError,
    collective,
    run_graph,
    same_bits,
    with_layout,
)
from tests.harness.powers.proofs.toy_graphs import GROUPS, PAIRS, as_data, c10d, names_of, randn, trace

W, X = randn(4, 6), randn(4, 6)


def test_memory_is_laid_out_as_asked():
    x = with_layout(W, (4, 6), (1, 4), 12)
    assert (x.stride(), x.storage_offset() * 4, torch.equal(x, W)) == ((1, 4), 12, True)
    rows = with_layout(W[:1].expand(4, 6), (4, 6), (0, 1), 0)
    assert (rows.stride(), torch.equal(rows, W[:1].expand(4, 6))) == ((0, 1), True)
    assert with_layout(torch.tensor(3.0), (), (), 4) == 3


def test_collectives_go_among_the_ranks_of_each_group_in_its_order():
    xs = [torch.full((2,), float(rank)) for rank in range(4)]
    gathered = collective("c10d.all_gather_into_tensor", ((1, 0), (2, 3)), [(x,) for x in xs])
    assert [x.tolist() for x in gathered] == [[1, 1, 0, 0]] * 2 + [[2, 2, 3, 3]] * 2
    reduced = collective("c10d.reduce_scatter_tensor", PAIRS, [(x + torch.arange(2.0), "sum") for x in xs])
    assert [x.tolist() for x in reduced] == [[1], [3], [5], [7]]
    sizes = ([1, 1], [1, 1])
    sent = collective("c10d.all_to_all_single", PAIRS, [(x + torch.arange(2.0) * 10, *sizes) for x in xs])
    assert [x.tolist() for x in sent] == [[0, 1], [10, 11], [2, 3], [12, 13]]
    with pytest.raises(NotEvaluatedError):
        collective("c10d.broadcast", PAIRS, [(x,) for x in xs])


def test_a_term_has_the_graphs_bits_on_every_rank():
    def step(w, x):
        rows = c10d.wait_tensor(c10d.all_gather_into_tensor((w * x).bfloat16(), 2, "pairs"))
        loss = (rows.t() @ rows).float().sum(0)
        w.add_(x)
        return c10d.wait_tensor(c10d.reduce_scatter_tensor(loss, "avg", 2, "pairs"))

    module = trace(step, (W, X))
    proof = prove_graphs(*[as_data(module, (W, X))] * 2)
    assert proof.verdict == "PROVED"
    inputs = [[W * rank, X + rank] for rank in range(4)]
    outputs, held = run_graph(module, inputs, GROUPS.partitions())
    evaluator = Evaluator(proof.table, [dict(zip(names_of(own), own, strict=True)) for own in inputs])
    loss, written = (evaluator(answer.terms[0]) for answer in proof.answers)
    assert all(same_bits(x, y[0]) for x, y in zip(loss, outputs, strict=True))
    assert all(same_bits(x, y[0]) for x, y in zip(written, held, strict=True))
    assert not same_bits(loss[0], outputs[2][0])


def test_a_collective_that_is_late_shows_what_was_written_in_flight():
    def step(written_before_waiting):
        def run(w, x):
            y = w * x
            launch = c10d.all_gather_into_tensor(y, 2, "pairs")
            if written_before_waiting:
                y.neg_()
            rows = c10d.wait_tensor(launch)
            y.neg_()
            return rows, c10d.wait_tensor(launch)

        return run

    for written, agrees in ((False, True), (True, False)):
        module = trace(step(written), (W, X))
        early, late = (run_graph(module, [[W, X]] * 4, GROUPS.partitions(), late=late)[0][0] for late in (False, True))
        assert [same_bits(x, y) for x, y in zip(early, late, strict=True)] == [agrees, agrees]


def test_what_draws_random_numbers_is_not_computed():
    proof = prove_graphs(*[as_data(trace(lambda w, x: torch.rand_like(w) * w * x, (W, X)), (W, X))] * 2)
    with pytest.raises(NotEvaluatedError, match="rand_like"):
        Evaluator(proof.table, [{"parameter 0": W, "input 0": X}])(proof.answers[0].terms[0])


def test_bits_are_compared_with_signs_of_zeros_and_without_those_of_nans():
    zero, nan = torch.tensor([0.0]), torch.tensor([float("nan")])
    assert same_bits(nan, -nan)
    assert not same_bits(zero, -zero)
    assert not same_bits(zero, nan)
    assert not same_bits(zero, zero.double())
    assert not same_bits(zero, zero[None])
    assert same_bits(torch.tensor([True]), torch.tensor([True]))
