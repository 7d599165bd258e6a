"""The checker's tables of operators beside the prover's, and what may read what is in flight."""

from contextlib import nullcontext

import pytest
import torch

from bitproof.harness import certificate_checker as own
from bitproof.harness.certificate_checker import GATHER
from bitproof.harness.powers.proofs.prover import known_operators, rules
from bitproof.harness.powers.proofs.prover.graphs.export import RefusedError
from bitproof.harness.powers.proofs.prover.memory import GraphMemory
from bitproof.harness.powers.proofs.prover.proof_data import FLOATS, WHOLE, Call, Graph, Tensor


def full_names(names):
    return {f"{name}.default" for name in names}


def test_the_checkers_own_tables_of_operators_say_what_the_provers_say() -> None:
    exact = {"aten._to_copy.default": "cast", **known_operators.EXACT}
    exact |= {name: known_operators.EXACT[of] for name, of in known_operators.IN_PLACE.items()}
    assert exact == own.EXACT
    assert own.DIVISIONS == known_operators.DIVISIONS
    assert own.FILLS == known_operators.FILLS
    assert (own.CARRIERS, {*own.UPDATES}) == (known_operators.CARRIES, known_operators.UPDATES)
    assert {*own.COMMUTE} == known_operators.COMMUTING
    assert {*known_operators.COPIES, known_operators.COPY_INTO} == own.COPIES
    assert {*own.RESHAPES} == known_operators.RESHAPES
    assert own.SPLIT == known_operators.SPLIT
    assert full_names(own.WAITS) == {name for name in known_operators.WAITS if not name.startswith("torch.")}
    assert {*own.COLLECTIVES} == known_operators.COLLECTIVES
    waits = "_c10d_functional.wait_tensor.default"
    assert {*own.COLLECTIVES, waits, *known_operators.HIGHER_ORDER} == own.UNDERSTOOD
    names = {schema.name.split("::")[1] for schema in torch._C._jit_get_all_schemas()}
    names -= {"inductor_rand_eager_offsets"}  # there once Inductor is imported; nothing that a proof takes
    for is_unwritten in (own.is_unwritten, known_operators.is_unwritten):
        assert {name for name in names | known_operators.UNINITIALIZED if is_unwritten(name)} == (
            known_operators.UNINITIALIZED
        )
    assert all(name.startswith(own.REFUSED) for name in known_operators.REFUSED | known_operators.HIGHER_ORDER)
    assert all(f"{family}.all_reduce.default".startswith(own.REFUSED) for family in known_operators.FAMILIES)
    assert {*own.REAL} == {*FLOATS} and {*own.WHOLE} == {*WHOLE}


def test_each_rule_of_the_prover_is_one_of_the_checkers() -> None:
    assert {rule.__name__ for several in rules.RULES.values() for rule in several} <= {*own.RULES}


@pytest.mark.parametrize(
    ("op", "races"),
    [
        ("aten.zeros_like.default", False),
        ("aten.new_empty_strided.default", False),
        ("user.empty_of_mine.default", False),
        ("_c10d_functional.wait_tensor.default", False),
        ("aten.rand_like.default", True),
        ("aten.nonempty.default", True),
    ],
)
def test_before_a_wait_only_waits_fills_and_new_memory_read_what_is_launched(op, races):
    lies = [Tensor("float32", "cpu", (2,), (1,), 0, storage) for storage in range(3)]
    read = Call(GATHER, GATHER, (("self", ("node", 0)),), lies[1])
    calls = Call("x", "input", (), lies[0]), read, Call("it", op, (("self", ("node", 1)),), lies[2])
    memory = GraphMemory(Graph(calls, ()))
    memory.run(1, read, None)
    with pytest.raises(RefusedError, match="before anything waits for it") if races else nullcontext():
        memory.refuse_read_in_flight(calls[2])
