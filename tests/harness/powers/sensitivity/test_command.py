"""`bitproof sensitivity` as it is called."""

from __future__ import annotations

import json

import pytest

from bitproof.harness.errors import UsageError
from bitproof.harness.execute import launch
from bitproof.harness.options import RunOptions
from bitproof.harness.powers.sensitivity.check import SensitivityCheck, SensitivityOptions
from bitproof.harness.powers.sensitivity.command import sensitivity
from bitproof.harness.powers.sensitivity.records import Effort, Sensitivity
from bitproof.harness.powers.sensitivity.report import finding_of
from tests.harness.powers.sensitivity.test_report import FOUND
from tests.harness.reports import case, result

OPTIONS = RunOptions(device="cpu", active=(SensitivityCheck(SensitivityOptions(Effort(sample=5))),))


@pytest.mark.parametrize(
    ("verdict", "found", "status"),
    [
        ("EQUAL", FOUND, 0),
        ("EQUAL", Sensitivity(reason="it cannot be"), 3),
        ("EQUAL", None, 3),
        ("DIFFERENT", None, 1),
    ],
)
def test_the_status_is_that_of_the_run_and_3_where_nothing_was_measured(
    tmp_path, monkeypatch, capsys, verdict, found, status
):
    given = result(case("near"), verdict, checks={"sensitivity": finding_of(found)} if found else {})
    monkeypatch.setattr(launch, "run_cases", lambda *_: iter([given]))
    assert sensitivity([given.case], OPTIONS, tmp_path) == status
    reported = json.loads((tmp_path / "latest" / "report.json").read_text())["cases"][0]
    assert (reported["verdict"], reported["checks"] == {}) == (verdict, found is None)
    assert f"near: {verdict}, " in capsys.readouterr().out


def test_ranks_of_torchrun_are_refused(tmp_path, monkeypatch):
    for name in ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "0")
    with pytest.raises(UsageError, match="replays all ranks in one process"):
        sensitivity([case()], OPTIONS, tmp_path)
