"""The checker's tables of operators beside the prover's, and what may read what is in flight."""

import pytest
import torch

from bitproof.harness.certificate import operator_names as own
from bitproof.harness.certificate import rules
from bitproof.harness.certificate.data import Call, Graph, Tensor
from bitproof.harness.certificate.in_flight import InFlight
from bitproof.harness.prove import known_operators


def test_the_checkers_own_tables_of_operators_say_what_the_provers_say() -> None:
    exact = {own.CAST: "cast", **known_operators.EXACT}
    exact |= {name: known_operators.EXACT[of] for name, of in known_operators.IN_PLACE.items()}
    assert exact == own.EXACT
    assert ({*own.DIVISIONS}, own.POWER) == (known_operators.DIVISIONS, known_operators.POWER)
    assert own.FILLS == known_operators.FILLS
    assert ({*own.CARRIES}, {*own.UPDATES}) == (known_operators.CARRIES, known_operators.UPDATES)
    assert (own.PAD, rules.FLIP) == (known_operators.PAD, known_operators.FLIP)
    assert {*rules.COMMUTING} == known_operators.COMMUTING
    assert {*own.COPIES} == {*known_operators.COPIES, known_operators.COPY_INTO}
    assert {*own.RESHAPES} == known_operators.RESHAPES
    assert own.SPLIT == known_operators.SPLIT
    assert {*own.WAITS} == {name for name in known_operators.WAITS if not name.startswith("torch.")}
    assert {*own.COLLECTIVES} == known_operators.COLLECTIVES
    assert {*own.UNDERSTOOD} == {*own.COLLECTIVES, *own.WAITS, *known_operators.HIGHER_ORDER}
    names = {schema.name.split("::")[1] for schema in torch._C._jit_get_all_schemas()}
    names -= {"inductor_rand_eager_offsets"}  # there once Inductor is imported; nothing that a proof takes
    assert {name for name in names | known_operators.UNINITIALIZED if own.is_unwritten(name)} == (
        known_operators.UNINITIALIZED
    )
    assert all(name.startswith(own.REFUSED) for name in known_operators.REFUSED | known_operators.HIGHER_ORDER)
    assert all(f"{family}.all_reduce.default".startswith(own.REFUSED) for family in known_operators.FAMILIES)


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
    read = Call(own.GATHER, own.GATHER, (("self", ("node", 0)),), lies[1])
    calls = Call("x", "input", (), lies[0]), read, Call("it", op, (("self", ("node", 1)),), lies[2])
    in_flight = InFlight(Graph(calls, ()))
    in_flight.run(1, read, None)
    assert bool(in_flight.races(calls[2])) == races
