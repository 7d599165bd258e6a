"""Ground truth: an operator with other bits is named, with its cause where it can be shown, and nothing else is."""

import re

import pytest
import torch

from bitproof.harness.powers.moved.move_causes import causes_of
from bitproof.harness.powers.moved.standalone.call_archive import Archive
from bitproof.harness.powers.moved.standalone.exchanging import run_exchanged
from bitproof.harness.powers.moved.standalone.order_probes import order_of_additions, probe
from bitproof.harness.powers.moved.standalone.recording_calls import keep_results
from bitproof.harness.powers.moved.standalone.replaying import replay
from tests.harness.powers.moved.plants import backwards, in_order, planted, plants, products_of

PLANTS = plants()


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def states(found):
    return {row["state"] for row in found["rows"].values()}


def test_at_least_thirty_moves_are_planted():
    assert len(PLANTS) >= 30


@pytest.mark.parametrize("times", [1, 2, 3])
def test_nothing_moves_where_nothing_was_planted(archive_folder, times):
    assert states(replay(Archive(str(archive_folder)))) == {"equal"}


def function_of(operator, kind):
    """The first way of a plant."""
    return next(plant.ways[0][0] for plant in PLANTS if (plant.operator, plant.kind) == (operator, kind))


def way_that_moves(archive, plant):
    """The first way of a plant that changes bits on this machine; the last one if none does."""
    for way in plant.ways:
        with planted(plant.operator, way[0]):
            if "moved" in states(replay(archive)):
                return way
    return plant.ways[-1]


@pytest.mark.parametrize("plant", PLANTS, ids=str)
def test_a_planted_move_is_named_and_its_old_results_make_the_program_equal(archive_folder, tmp_path, plant):
    archive = Archive(str(archive_folder))
    operator, (function, cause) = plant.operator, way_that_moves(archive, plant)
    names = {call["key"]: call["op"] for call in archive.calls}
    overload = operator if "." in operator else {"sigmoid": "sigmoid.default"}.get(operator, f"{operator}.default")
    with planted(operator, function):
        rows = replay(archive)["rows"]
        moved = [key for key, row in rows.items() if row["state"] == "moved"]
        assert {names[key] for key in moved} == {f"aten.{overload}"}
        assert not {row["state"] for row in rows.values()} - {"equal", "moved"}
        now = {key: probe(archive, call) for call in archive.calls if (key := call["key"]) in moved}
    was = {key: probe(archive, call) for call in archive.calls if (key := call["key"]) in moved}
    if cause:
        assert any(re.search(cause, text) for key in moved for text in causes_of(was[key], now[key]))
    kept = keep_results(str(archive_folder), str(tmp_path), set(moved), set(), 1 << 26)
    assert kept["repeats"]
    with planted(operator, function):
        plain = run_exchanged(archive, None, set())
        exchanged = run_exchanged(archive, str(tmp_path), set(moved))
    assert not plain["equal"] and exchanged["equal"]
    assert exchanged["moved_again"] is None and exchanged["other"] is None


def test_a_wrong_edge_is_located(archive_folder):
    archive = Archive(str(archive_folder))
    with planted("relu", function_of("relu", "edge")):
        (row,) = [row for row in replay(archive)["rows"].values() if row["state"] == "moved"]
    assert (row["where"], row["ulps"], row["elements"]) == ("index 31 of dim 1", 1, 8)


def test_a_call_that_differs_from_itself_is_nondeterministic_and_not_moved(archive_folder):
    noise = iter(range(1, 1000))
    with planted("relu", lambda x: x + next(noise)):
        found = replay(Archive(str(archive_folder)))
    assert states(found) == {"equal", "nondeterministic"}


def test_inputs_above_the_budget_are_drawn_again_alike(tmp_path):
    from bitproof.harness.powers.moved.standalone.recording_calls import record
    from tests.harness.powers.moved.plants import PROGRAM

    (tmp_path / "small_budget.py").write_text(PROGRAM)
    found = record(str(tmp_path / "calls"), f"{tmp_path}/small_budget.py:calls", [], 1, 20_000)
    assert found["drawn"] > 5 and found["bytes"] <= 20_000 + 20 * 5056
    archive = Archive(str(tmp_path / "calls"))
    assert states(replay(archive)) == {"equal"}
    with planted("mv", function_of("mv", "in order")):
        assert [archive.calls[0]["op"][:4], states(replay(archive))] == ["aten", {"equal", "moved"}]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_order_of_additions_is_found_in_each_dtype(dtype):
    tensors = [{"shape": [4, 12], "dtype": dtype}, {"shape": [12, 3], "dtype": dtype}]
    call = {"op": "aten.mm.default", "args": [["t", 0], ["t", 1]], "tensors": tensors}
    found = {}
    for name, add in {"in order": in_order, "backwards": backwards}.items():
        with planted("mm", lambda a, b, add=add: add(products_of(a, b)).to(a.dtype)):
            found[name] = order_of_additions(call)["sizes"][:11]
    assert found == {"in order": [*range(2, 13)], "backwards": [12] * 11}
