"""Calls examined by forked processes, from a recording of ranks."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace

import pytest

from bitproof.harness.cli import main
from bitproof.harness.errors import RankError
from bitproof.harness.powers.sensitivity.examine import CallFinding
from bitproof.harness.powers.sensitivity.sensing import Sensing, _forked, isolated, outcome_of, sense_apart
from bitproof.harness.powers.sensitivity.spread import FAILURE, Fate
from bitproof.harness.report import json as report_json
from tests.harness.powers.sensitivity.test_measure import CASE

pytestmark = pytest.mark.ranks


def test_what_forked_processes_find_is_gathered_and_one_that_dies_is_an_error():
    def share(*calls):
        return lambda: (CallFinding(call=call, lost=(call,)) for call in calls)

    found = sorted(_forked([share(1, 2), share(3)]), key=lambda finding: finding.call)
    assert found == [CallFinding(call=call, lost=(call,)) for call in (1, 2, 3)]

    def dies():
        yield CallFinding(call=1)
        os._exit(7)

    with pytest.raises(RankError, match=r"(?s)follows errors through a step failed.*exit status 7"):
        list(_forked([dies, share(2)]))


def test_a_crash_is_a_failure_and_harms_nobody():
    assert isolated(lambda: Fate(None, (3, -1))) == Fate(None, (3, -1))
    assert isolated(lambda: Fate("loss")) == Fate("loss")
    assert isolated(lambda: os.kill(os.getpid(), signal.SIGKILL)) == Fate(FAILURE)


def test_a_case_that_ran_on_a_gpu_is_not_replayed(tmp_path):
    found = sense_apart(Sensing(case=CASE, recording=tmp_path), "cuda", tmp_path / "log")
    assert found.reason == "steps are replayed on the CPU, and this case ran on cuda"


def test_a_system_that_is_no_graph_is_reported_before_anything_is_read(tmp_path):
    found = outcome_of(Sensing(case=replace(CASE, candidate="mine.py:make"), recording=tmp_path / "none"))
    assert (found.share, found.reason) == (None, "system mine.py:make is not known as a graph")


@pytest.mark.slow
def test_a_case_is_measured_by_its_command_whole_or_by_a_sample(tmp_path, capsys):
    file = tmp_path / "small.json"
    file.write_text(json.dumps(replace(CASE, name="small").to_dict()))

    def measured(*options):
        status = main(["sensitivity", "--case", str(file), "--report-dir", str(tmp_path), *options])
        report = report_json.read(tmp_path / "latest" / "report.json")
        return status, report.cases[0].sensitivity, capsys.readouterr().out

    status, sampled, reported = measured("--sample", "40", "--steps", "1")
    assert status == 0 and sampled.total("tried") == 40 and sampled.is_sampled
    low, high = sampled.interval
    assert low < sampled.share < high and ", by a sample of 40 (" in reported
    status, whole, reported = measured()
    assert status == 0 and whole.total("tried") == whole.total("calls") > 700 and whole.interval is None
    assert low <= whole.share <= high and whole.steps == 2
    assert f"small: EQUAL, sees {100 * whole.share:.1f}% of {whole.total('calls'):,} calls" in reported
    again = measured("--sample", "40", "--steps", "1")[1]
    assert replace(again, seconds=None) == replace(sampled, seconds=None), "what is drawn hangs on the case's seed"
