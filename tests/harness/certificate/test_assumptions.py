"""Each assumption is listed where the graphs, or the rules that were used, make it, and nowhere else."""

import pytest

from bitproof.harness.certificate_checker import ASSUMPTIONS
from bitproof.harness.powers.proofs.prover.certify import assumed
from bitproof.harness.powers.proofs.prover.proof_data import Call, Graph
from bitproof.harness.powers.proofs.prover.rules import reduce_of_cat

PLAIN = ("view", "aten.mul.Tensor")
ALWAYS = [text for name, text in ASSUMPTIONS if not name]
COLLECTIVES, BUCKETS, UPDATES, _, GROUPED = (text for name, text in ASSUMPTIONS if name)


@pytest.mark.parametrize(
    ("operators", "rules", "more"),
    [
        ((), set(), []),
        (("_c10d_functional.wait_tensor.default",), set(), [COLLECTIVES]),
        (("aten._grouped_mm.default",), {"another_rule"}, [GROUPED]),
        (("aten._fused_adam.default",), set(), [UPDATES]),
        (("aten._fused_adamw.default",), set(), [UPDATES]),
        ((), {reduce_of_cat.__name__}, [BUCKETS]),
        (
            ("aten._grouped_mm.default", "_c10d_functional.all_reduce.default"),
            {reduce_of_cat.__name__},
            [COLLECTIVES, BUCKETS, GROUPED],
        ),
    ],
)
@pytest.mark.parametrize("side", [0, 1], ids=["reference", "candidate"])
def test_what_is_assumed_follows_from_operators_and_rules(side, operators, rules, more):
    graphs = [graph_of(*PLAIN), graph_of(*PLAIN)]
    graphs[side] = graph_of(*PLAIN, *operators)
    assert [*assumed(graphs, rules)] == [*ALWAYS, *more]


def graph_of(*operators):
    return Graph(tuple(Call(name=f"n{i}", op=op, args=(), value=None) for i, op in enumerate(operators)), ())
