"""`bisect`: what it refuses, shows and writes, on a desk of made-up systems, and once over real ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bitproof.builtin_cases.chunking import transformer_batch
from bitproof.harness.case import Case, Memory, Model, Parallelism
from bitproof.harness.errors import CaseError
from bitproof.harness.options import RunOptions
from bitproof.harness.powers.shrink.bisect_command import BISECT_FILE, bisect, dumped_diff
from bitproof.harness.powers.shrink.bisection_report import describe_answer
from tests.harness.localize.pass_defects import hosts_with
from tests.harness.powers.shrink.test_bisect_passes import CASE, MINE, OPTIONS, Bench, defect_of, searched

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize(("reference", "candidate"), [("eager", "eager_chunked"), ("graph", "graph")])
def test_systems_without_passes_to_distinguish_are_refused(tmp_path: Path, reference: str, candidate: str) -> None:
    case = replace(CASE, reference=reference, candidate=candidate)
    with pytest.raises(CaseError) as error:
        bisect(case, OPTIONS, tmp_path)
    assert error.value.found == f"reference {reference}, candidate {candidate}"
    assert error.value.fix is not None and error.value.fix.endswith("--candidate graph")
    assert list(tmp_path.iterdir()) == []


def test_systems_whose_passes_are_not_known_are_sent_to_localize(tmp_path: Path) -> None:
    case = replace(CASE, reference="mine.py:eager", candidate="mine.py:graph")
    with pytest.raises(CaseError) as error:
        bisect(case, OPTIONS, tmp_path)
    assert error.value.found == "reference mine.py:eager, candidate mine.py:graph"
    assert error.value.fix is not None and "--candidate compiled" in error.value.fix
    assert "bitproof localize" in error.value.fix


# -- what is written and shown --------------------------------------------------------------------------


def bisected(bench: Bench, monkeypatch: pytest.MonkeyPatch, case: Case = CASE) -> tuple[int, dict[str, Any]]:
    @contextmanager
    def opened(cases: Sequence[Case], run_dir: Path, options: RunOptions) -> Iterator[Bench]:
        bench.run_dir = run_dir
        yield bench

    monkeypatch.setattr("bitproof.harness.powers.shrink.bisect_command.open_client", opened)
    status = bisect(case, OPTIONS, bench.run_dir / "reports", ["--steps", "4"])
    return status, json.loads((bench.run_dir / "bisect.json").read_text())


def test_a_bisection_is_written_with_its_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, written = bisected(Bench(tmp_path, defect_of("bucket")), monkeypatch)
    assert status == written["exit_status"] == 1
    assert (written["case"], written["verdict"], written["pass"], written["equal"]) == (
        "batch",
        "DIFFERENT",
        "bucket",
        "chunk",
    )
    assert written["first_divergence"]["pass"] == "bucket"
    assert [probe["verdict"] for probe in written["probes"][:2]] == ["DIFFERENT", "EQUAL"]
    assert written["answer"][:2] == [
        "bucket is to blame: the prefix that ends with chunk is EQUAL, the one that ends with bucket is DIFFERENT",
        "first divergence: step 1, rank 0, loss weight",
    ]
    out = capsys.readouterr().out
    assert "until chunk, against eager_chunked: EQUAL in" in out
    assert "\napplied" in out
    assert written["answer"][0] in out
    report = json.loads((tmp_path / "reports" / "latest" / "report.json").read_text())
    assert report["cases"][0]["first_divergence"]["pass"] == "bucket"


def test_an_interrupted_bisection_says_so_and_keeps_what_it_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(applied: Sequence[str]) -> bool:
        if applied[-1:] == ["bucket"]:
            raise KeyboardInterrupt
        return False

    status, written = bisected(Bench(tmp_path, defect_of("overlap"), refuse=interrupt), monkeypatch)
    assert (status, written["pass"], written["problem"]) == (3, None, "interrupted")
    assert written["suspects"] == ["chunk", "bucket", MINE, "overlap", "concretize_symbols"]
    assert [probe["verdict"] for probe in written["probes"]] == ["DIFFERENT", "EQUAL"]


def test_what_the_blamed_pass_did_is_pointed_at(tmp_path: Path) -> None:
    bench = Bench(tmp_path, defect_of("bucket"))
    found = searched(bench).found
    assert bench.runs("graph")[0].graph_options.dump_dir == tmp_path / "graphs" / "batch"
    assert all(run.graph_options.dump_dir is None for run in bench.runs("graph")[1:])
    diff = tmp_path / "graphs" / "batch" / "05-bucket.diff"
    diff.parent.mkdir(parents=True)
    diff.write_text("")
    assert list(describe_answer(found, None, dumped_diff(found, tmp_path, "batch"), ["--steps", "4"], "batch"))[
        -2:
    ] == [
        f"what the pass did: {diff}",
        "  again: bitproof run -k batch --steps 4 --dump-graphs",
    ]
    answer = list(describe_answer(found, None, diff, ["--case", "small.json"], "batch"))
    assert answer[-1] == "  again: bitproof run --case small.json --dump-graphs", "the file says which case"


# -- over real ranks ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_defect_inside_a_pass_that_comes_with_bitproof_is_named_with_its_call(tmp_path: Path) -> None:
    case = replace(
        transformer_batch,
        steps=1,
        model=Model(flavor="dense"),
        parallelism=Parallelism(world_size=2),
        memory=Memory(policy="full"),
    )
    with hosts_with("repeat_with_another_epsilon"):
        assert bisect(case, RunOptions(device="cpu", timeout=120.0), tmp_path) == 1
    found = json.loads((tmp_path / "latest" / BISECT_FILE).read_text())
    assert (found["pass"], found["equal"], found["region"]) == ("rematerialize", "tag_memory", None)
    first = found["first_divergence"]
    assert (first["pass"], first["operator"], first["direction"]) == ("rematerialize", "add.Tensor", "forward")
    assert first["node"].startswith("add_") and "_recomputed" in first["node"]
    probes = [(probe["applied"], probe["reference"], probe["verdict"]) for probe in found["probes"]]
    assert probes == [
        ("all passes", "eager_chunked", "DIFFERENT"),
        ("until tag_memory", "eager", "EQUAL"),
        ("until chunk", "eager_chunked", "DIFFERENT"),
        ("until rematerialize", "eager", "DIFFERENT"),
    ]
    diff = tmp_path / "latest" / "graphs" / "transformer_batch" / "03-rematerialize.diff"
    assert str(diff.resolve()) in found["answer"][-2] and diff.is_file()
