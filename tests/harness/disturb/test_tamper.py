"""Calls that do something else than they should, and what is not touched by it."""

from __future__ import annotations

import torch

from bitproof.harness.disturb.entry import Entry
from bitproof.harness.disturb.faults import Injector, parse_fault
from bitproof.harness.disturb.faults.catalogue import CATALOGUE
from bitproof.harness.disturb.faults.clock import Clock
from bitproof.harness.disturb.tamper import tampered, untampered

X = torch.tensor([1.0, 2.0])


def entry(call, *operators):
    return Entry(name="test", says="", source="", call=call, operators=operators)


def test_only_calls_of_the_named_operators_are_tampered_with():
    fired = []
    row = entry(lambda call: call.with_(alpha=2), "add")
    with tampered(row, Clock(), lambda: fired.append(1)) as turns:
        assert torch.add(X, X).tolist() == [3.0, 6.0]
        assert torch.mul(X, X).tolist() == [1.0, 4.0]
    assert torch.add(X, X).tolist() == [2.0, 4.0]
    assert (len(fired), dict(turns)) == (1, {"add": 1})


def test_a_call_knows_its_turn_its_arguments_and_its_own_result():
    seen = []

    def look(call):
        seen.append((call.turn, call.given("alpha"), call.run().tolist()))
        return call.run()

    with tampered(entry(look, "add"), Clock(), lambda: None):
        torch.add(X, X)
        torch.add(X, X, alpha=3)
    assert seen == [(0, None, [2.0, 4.0]), (1, 3, [4.0, 8.0])]


def test_what_observing_calls_is_not_the_systems():
    lines = []
    row = entry(lambda call: call.with_(alpha=2), "add")
    with tampered(row, Clock(), lambda: None):
        untampered(lambda x: lines.append(torch.add(x, x).tolist()))(X)
    assert lines == [[2.0, 4.0]]


def test_a_fault_of_calls_changes_an_optimizers_update_and_has_fired():
    def update(name):
        injector = Injector(parse_fault(name) if name else None, 0, 2)
        parameters = [torch.nn.Parameter(X.clone()) for _ in range(2)]
        optimizer = torch.optim.AdamW(parameters, lr=0.5, weight_decay=0.5, fused=True)
        with injector.at_work():
            injector.begin_step(0)
            for parameter in parameters:
                parameter.grad = X.clone()
            optimizer.step()
        injector.check_fired()
        return [parameter.tolist() for parameter in parameters]

    rows = [row.name for row in CATALOGUE.values() if row.family == "optimizer" and not row.needs and row.rank is None]
    found = {name: update(name) for name in rows if name not in ("moments-in-bfloat16", "other-epsilon-in-adam")}
    right = update(None)
    assert [name for name, values in found.items() if values == right] == ["gradients-rounded-for-the-update"]
    assert update("optimizer-one-parameter-a-call") == right
