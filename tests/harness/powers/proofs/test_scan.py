"""The scan of torch's operators as a whole: it contradicts a list that lies, outlives a crash, and can be cut off.

What it sees of one call is tested in `test_admitted.py`.
"""

import json
import os
import random
import signal

import pytest
import torch

from bitproof.harness.powers.proofs.prover.graphs import admitted
from tests.benchmarks.scan_operators import Notes, narrowed, print_findings, scan_apart
from tests.harness.powers.proofs.scan import Scanned, scan
from tests.harness.powers.proofs.toy_graphs import aten, randn

pytestmark = pytest.mark.ranks  # it forks a process an operator

X, MEAN, VAR = randn(4, 6), torch.zeros(6), torch.ones(6)
NOTES = Notes(None, "")
HONEST, LIES = "aten.tanh.default", "aten.native_batch_norm.default"
CALLS = {HONEST: (X,), LIES: (X, None, None, MEAN, VAR, True, 0.1, 1e-5)}


def work_of(name):
    packet, overload = name.removeprefix("aten.").split(".")
    op = getattr(getattr(aten, packet), overload)
    return lambda: scan(op, [(CALLS[name], {})], at_most=6, chance=random.Random(0))


@pytest.fixture
def listed(monkeypatch):
    names = {}
    monkeypatch.setattr(admitted, "names", lambda mixture=admitted.ALIKE: names)
    return names


def status_of(found):
    return print_findings(found, {}, 0.0, partial=True)


def test_a_list_that_holds_an_operator_which_writes_what_it_does_not_say_is_contradicted(listed, capsys):
    found = {}
    scan_apart({name: work_of(name) for name in CALLS}, 2, found, NOTES)
    listed[HONEST] = admitted.ANY
    assert status_of(found) == 0
    assert "admitted: 1; of these misbehave: none" in capsys.readouterr().out
    listed[LIES] = admitted.ROWS
    assert status_of(found) == 1
    reported = capsys.readouterr().out
    assert f"| {LIES} | it writes running_mean, which its schema does not say | rows |" in reported
    assert f"admitted: 2; of these misbehave: {LIES}" in reported


def test_an_operator_that_misbehaves_only_in_layouts_in_which_it_is_not_admitted_contradicts_nothing(listed):
    seen = Scanned(tried=3, ran=3, faults={"it writes x": {admitted.ANY: "call"}}, in_layout={admitted.ROWS: 3})
    listed[HONEST] = admitted.INNER
    assert status_of({HONEST: seen}) == 0
    listed[HONEST] = admitted.ANY
    assert status_of({HONEST: seen}) == 1


def test_what_was_contradicted_leaves_the_list_or_keeps_the_layouts_in_which_nothing_was_and_nothing_is_added():
    fault, ran = {"it writes x": {admitted.ANY: "call"}}, dict.fromkeys(admitted.LAYOUTS, 3)
    found = {
        "wide": Scanned(ran=9, faults=fault, in_layout=ran),
        "narrow": Scanned(ran=9, faults=fault, in_layout=ran),
        "wrong": Scanned(ran=9, faults={"it writes x": {admitted.ROWS: "call"}}, in_layout=ran),
        "crashed": Scanned(crashed=True),
        "fine": Scanned(ran=9, in_layout=ran),
        "new": Scanned(ran=9, in_layout=ran),
    }
    honest = {name: layout for name, seen in found.items() if (layout := seen.honest_in(3))}
    allowed = {
        "wide": "any-layout",
        "narrow": "rows",
        "wrong": "rows",
        "crashed": "rows",
        "fine": "rows",
        "other": "rows",
    }
    assert narrowed(allowed, found, honest) == {"wide": "inner-rows", "narrow": "rows", "fine": "rows", "other": "rows"}


def test_a_listed_operator_that_ends_its_process_or_never_ran_is_reported_and_the_others_are_scanned(listed, capsys):
    found = {}
    work = {
        "aten.one.default": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "aten.two.default": lambda: 1 / 0,
        "aten.three.default": Scanned,
        HONEST: work_of(HONEST),
    }
    scan_apart(work, 2, found, NOTES)
    assert [found[name].crashed for name in work] == [True, True, False, False]
    assert found[HONEST].ran == 6
    for name, reported in (
        ("one", "misbehave: aten.one"),
        ("two", "misbehave: aten.two"),
        ("three", "run: aten.three"),
    ):
        listed.clear()
        listed[f"aten.{name}.default"] = admitted.ANY
        assert status_of(found) == 1
        assert reported in capsys.readouterr().out


def test_a_scan_that_was_cut_off_goes_on_and_one_of_other_settings_begins_anew(tmp_path):
    notes, found = Notes(tmp_path / "seen.json", "40 calls"), {}
    assert notes.read() == {}
    scan_apart({HONEST: work_of(HONEST)}, 1, found, notes)
    assert json.loads((tmp_path / "seen.json").read_text())["found"].keys() == {HONEST}
    assert notes.read() == found
    assert Notes(notes.file, "8 calls").read() == {}
