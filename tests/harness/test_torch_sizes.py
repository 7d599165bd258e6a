import operator

import pytest
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from bitproof.harness.torch_sizes import remember_arithmetic

OPERATORS = [operator.add, operator.sub, operator.mul, operator.eq, operator.ne]
ORDERS = [operator.lt, operator.le, operator.gt, operator.ge]


def two_sizes(env: ShapeEnv) -> tuple[torch.SymInt, torch.SymInt]:
    return env.create_unbacked_symint(), env.create_unbacked_symint()


@pytest.mark.parametrize("of", [*OPERATORS, *ORDERS])
def test_what_is_computed_again_is_what_torch_computes_and_a_node_of_its_own(of):
    plain, remembering, found = ShapeEnv(), ShapeEnv(), []
    remember_arithmetic(remembering)
    for env in (plain, remembering):
        a, b = two_sizes(env)
        pairs = [(a, b), (a, 4), (b * 3, a), (a + b, a * b), (a + 2, 2)]
        found.append([of(x, y).node for _ in range(2) for x, y in pairs])
    lines = [[(str(node.expr), node.pytype, node.hint) for node in nodes] for nodes in found]
    assert lines[0] == lines[1]
    assert len({id(node) for node in found[1]}) == len(pairs) * 2


def test_what_is_known_of_a_symbol_later_counts():
    env = ShapeEnv()
    remember_arithmetic(env)
    a, b = two_sizes(env)
    both = a + b
    assert both.node.maybe_as_int() is None
    assert str((a < b).node.expr) == "u0 < u1"
    torch._check(a == 7)
    assert str((a < b).node.expr) == "7 < u1"
    torch._check(b == 7)
    assert both.node.maybe_as_int() == (a + b).node.maybe_as_int() == 14
    assert str((a < b).node.expr) == "False"


def test_another_environment_computes_as_before():
    remember_arithmetic(ShapeEnv())
    other = ShapeEnv()
    a, b = two_sizes(other)
    assert str((a + b).node.expr) == str((a + b).node.expr)
    assert not hasattr(other, "bitproof_results")
