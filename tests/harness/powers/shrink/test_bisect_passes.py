"""Which pass, and which region, is named, in how many runs, on a desk whose graphs go wrong where a test says."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from bitproof.harness.capture.recording_files import write_recording
from bitproof.harness.case import Case, Chunking, Memory, Parallelism, Pipeline
from bitproof.harness.errors import PassError, RankError, RecordingError
from bitproof.harness.execute.case_run import CaseRun
from bitproof.harness.execute.requests import RunAnswer, RunRequest
from bitproof.harness.execute.status_messages import PreparedGraph
from bitproof.harness.localize.logs.replay import SPARE_BYTES, LoggedStep, Replay
from bitproof.harness.machine.devices import Placement
from bitproof.harness.options import RunOptions
from bitproof.harness.powers.shrink.bisect_command import status_of
from bitproof.harness.powers.shrink.bisect_passes import Bisector, halve, shared_reference
from bitproof.harness.powers.shrink.bisection_report import describe_answer
from bitproof.harness.records import (
    BlamedCall,
    CaseResult,
    GraphIdentity,
    Key,
    Manifest,
    PassReport,
    Record,
    Recording,
    Verdict,
)

MINE = "mine"
COLUMN = ["clean_up", "tag_memory", "rematerialize", "chunk", "bucket", MINE, "overlap", "concretize_symbols"]
REGIONS = ["layers.0", "layers.1", "layers.2", "layers.3"]
CASE = Case(
    name="batch",
    family="test",
    chunking=Chunking(dim="batch", modules="layers.*"),
    steps=4,
    parallelism=Parallelism(world_size=2),
    memory=Memory(policy="full"),
    pipeline=Pipeline(bucket=True, overlap=True),
)
OPTIONS = RunOptions(device="cpu")


def defect_of(*passes: str) -> Callable[[Sequence[str], set[str]], bool]:
    """A defect that is there as soon as one of these passes has run."""
    return lambda applied, regions: not set(applied).isdisjoint(passes)


@dataclass
class Bench:
    """A client that records made-up systems. Chunking changes bits, as it does in truth; so does `defect`.

    `defect` is asked with the passes that ran, and the regions that chunk split, and shows from step `bad_step` on.
    """

    run_dir: Path
    defect: Callable[[Sequence[str], set[str]], bool] = lambda applied, regions: False
    column: Sequence[str] = tuple(COLUMN)
    bad_step: int = 1
    is_noisy: bool = False
    refuse: Callable[[Sequence[str]], bool] = lambda applied: False
    asked: list[RunRequest] = field(default_factory=list)

    @property
    def work(self) -> Path:
        return self.run_dir / "work"

    def place(self, case: Case) -> Placement:
        return Placement()

    def announce(self, result: CaseResult) -> None:
        raise AssertionError("nobody follows")

    def ask(self, request: Any, timeout: float, on_event: Callable[..., None] = lambda event: None) -> Any:
        if not isinstance(request, RunRequest):
            raise RankError("no bits are compared here")
        self.asked.append(request)
        if request.replay:
            raise RankError("nothing is replayed here")
        case, system = request.case, request.system
        applied = self._applied(case) if system == "graph" else []
        if self.refuse(applied):
            raise PassError("a pass refuses the graph")
        graph = {"code_hash": "0", "passes": [self._entry(name, case) for name in applied], "seconds": {}}
        manifest = {
            "case": case.to_dict(),
            "system": system,
            "arm": request.arm,
            "world_size": case.parallelism.world_size,
            "steps": case.steps,
            "graph": graph if system == "graph" else None,
            "chunked": dict.fromkeys(self._regions(case), 1)
            if system == "eager_chunked" or "chunk" in applied
            else None,
        }
        write_recording(request.out, Manifest.of(json.loads(json.dumps(manifest))), self._rows(case, system, applied))
        prepared = PreparedGraph(code_hash="0", passes=[PassReport(**entry) for entry in graph["passes"]])
        return RunAnswer(graph=prepared if system == "graph" else None)

    def _applied(self, case: Case) -> list[str]:
        column = [name for name in self.column if name != "chunk" or case.chunking]
        until = case.pipeline.until
        return column[: len(column) if until is None else column.index(until) + 1 if until else 0]

    def _entry(self, name: str, case: Case) -> dict[str, Any]:
        facts = {"modules": list(self._regions(case))} if name == "chunk" else {}
        return {"name": name, "seconds": 0.0, "nodes_before": 1, "nodes_after": 1, "settings": {}, "facts": facts}

    @staticmethod
    def _regions(case: Case) -> Sequence[str]:
        assert case.chunking is not None
        return case.chunking.only or REGIONS

    def _rows(self, case: Case, system: str, applied: Sequence[str]) -> Iterator[tuple[Key, Record]]:
        regions = set(self._regions(case)) if system == "eager_chunked" or "chunk" in applied else set()
        for step in range(case.steps):
            bits = f"{step} {sorted(regions)}"
            if system == "graph" and step >= self.bad_step and self.defect(applied, regions):
                bits += "wrong"
            if self.is_noisy:
                bits += str(len(self.asked))
            digest = hashlib.md5(bits.encode()).hexdigest()
            for rank in range(case.parallelism.world_size):
                for kind in ("loss", "grad", "param", "optimizer"):
                    record = Record(digest, "float32", (1,), (1.0).hex() if kind == "loss" else None)
                    yield Key(step, kind, "weight", rank), record  # type: ignore[arg-type]

    def runs(self, *systems: str) -> list[RunRequest]:
        """The first runs of some systems, without controls and replays."""
        return [r for r in self.asked if r.arm == "first" and r.system in systems and "_region_" not in r.case.name]


def searched(bench: Bench, case: Case = CASE, options: RunOptions = OPTIONS) -> Bisector:
    def run_of(case: Case, options: RunOptions) -> CaseRun:
        return CaseRun(case, Placement(), bench, options, lambda event: None)

    bisector = Bisector(case, options, run_of)
    bisector.search()
    return bisector


# -- the search itself ----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_passes", [1, 2, 3, 7, 8, 9, 20])
def test_every_pass_of_a_column_is_found_within_log2_of_them_and_two_runs(num_passes: int) -> None:
    for bad in range(num_passes + 1):
        asked: list[int] = []
        *_, suspects = halve(range(num_passes + 1), lambda half: asked.append(half[-1]) or half[-1] >= bad)
        assert list(suspects) == [bad]
        assert 1 + len(asked) <= math.log2(num_passes) + 2, "the run of all passes counts"


@pytest.mark.parametrize("num_passes", [1, 2, 3, 7, 8, 9, 20])
def test_a_guess_that_is_right_takes_three_runs_and_a_wrong_one_two_more_than_none(num_passes: int) -> None:
    for guess in range(1, num_passes + 1):
        for bad in range(num_passes + 1):
            asked: list[int] = []

            def differs(half: Sequence[int], bad: int = bad, asked: list[int] = asked) -> bool:
                asked.append(half[-1])
                return half[-1] >= bad

            *_, suspects = halve(range(num_passes + 1), differs, guess)
            assert list(suspects) == [bad]
            assert 1 + len(asked) <= (3 if bad == guess else math.log2(num_passes) + 4)


@pytest.mark.parametrize("bad", COLUMN)
def test_the_pass_that_first_changes_bits_is_named(tmp_path: Path, bad: str) -> None:
    bench = Bench(tmp_path, defect_of(bad))
    found = searched(bench).found
    before = (["trace", *COLUMN])[COLUMN.index(bad)]
    assert (found.blamed, found.equal, found.problem) == (bad, before, None)
    assert found.result is not None and found.result.first_divergence is not None
    assert found.result.first_divergence.pass_ == bad
    assert len(bench.runs("graph")) == len(found.probes) <= math.log2(len(COLUMN)) + 2


@pytest.mark.parametrize(
    ("operator", "probes"),
    [
        ("view", ["until bucket", f"until {MINE}"]),
        ("mul", ["until bucket", f"until {MINE}"]),  # its number was changed by others, too, before
        ("add", ["until rematerialize", "until chunk", f"until {MINE}", "until bucket"]),  # chunk's: not to blame
        ("neg", ["until rematerialize", "until bucket", f"until {MINE}"]),  # nobody's
    ],
)
def test_the_pass_that_changed_how_often_the_blamed_operator_is_called_is_guessed(
    tmp_path: Path, operator: str, probes: list[str]
) -> None:
    changed = {"chunk": {"add": (2, 4), "mul": (2, 4)}, MINE: {"view": (1, 0), "mul": (4, 5)}}

    class Blaming(CaseRun):
        def result(self) -> CaseResult:
            found = super().result()
            assert found.first_divergence is not None
            found.first_divergence.call = BlamedCall(operator=operator)
            found.passes = [replace(entry, changed=changed.get(entry.name, {})) for entry in found.passes]
            return found

    bench = Bench(tmp_path, defect_of(MINE))
    bisector = Bisector(
        CASE, OPTIONS, lambda case, options: Blaming(case, Placement(), bench, options, lambda event: None)
    )
    bisector.search()
    assert (bisector.found.blamed, bisector.found.equal) == (MINE, "bucket")
    assert [probe.applied for probe in bisector.found.probes[1:]] == probes


def test_each_reference_is_recorded_once_and_no_prefix_runs_longer_than_needed(tmp_path: Path) -> None:
    bench = Bench(tmp_path, defect_of("rematerialize"))
    found = searched(bench).found
    assert [probe.applied for probe in found.probes] == [
        "all passes",
        "until rematerialize",
        "until clean_up",
        "until tag_memory",
    ]
    assert sorted(run.system for run in bench.runs("eager", "eager_chunked")) == ["eager", "eager_chunked"]
    steps = {run.case.name: run.case.steps for run in bench.runs("graph", "eager")}
    assert steps.pop("batch") == 4
    assert set(steps.values()) == {bench.bad_step + 1}


def test_a_prefix_without_chunk_is_held_to_eager_and_one_with_it_to_the_cases_reference(tmp_path: Path) -> None:
    found = searched(Bench(tmp_path, defect_of("rematerialize"))).found
    chunked = {"all passes", *(f"until {name}" for name in COLUMN[COLUMN.index("chunk") :])}
    for probe in found.probes:
        assert probe.reference == ("eager_chunked" if probe.applied in chunked else "eager")
    assert {probe.reference for probe in found.probes} == {"eager", "eager_chunked"}


def test_a_case_that_does_not_chunk_has_one_reference(tmp_path: Path) -> None:
    case = replace(CASE, chunking=None, reference="eager")
    bench = Bench(tmp_path, defect_of("clean_up"))
    assert searched(bench, case).found.blamed == "clean_up"
    assert len(bench.runs("eager")) == 1


def test_a_backend_is_the_last_stage_and_its_prefix_runs_without_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path, defect_of("backend"), column=[*COLUMN, "backend"])
    case = replace(CASE, expected="CLOSE", close_within=0.1, pipeline=Pipeline(backend="inductor"))
    found = searched(bench, case).found
    assert (found.blamed, found.equal) == ("backend", "concretize_symbols")
    assert "backend" not in {run.case.pipeline.until for run in bench.runs("graph")}


def test_two_systems_that_agree_leave_nothing_to_bisect(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    found = searched(bench).found
    assert (found.blamed, found.problem, status_of(found)) == (None, None, 0)
    assert [run.system for run in bench.runs("eager", "eager_chunked", "graph")] == ["eager_chunked", "graph"]
    assert list(describe_answer(found, None, None, [], "batch")) == ["nothing to bisect: EQUAL"]


def test_a_traced_graph_that_differs_by_itself_is_distinguished_from_its_passes(tmp_path: Path) -> None:
    found = searched(Bench(tmp_path, lambda applied, regions: True)).found
    assert (found.blamed, found.equal, status_of(found)) == ("trace", None, 1)
    assert found.probes[-1].applied == "until trace"
    answer = list(describe_answer(found, None, None, [], "batch"))
    assert answer[0] == "trace is to blame: the traced graph is DIFFERENT before any pass"


def test_a_fault_that_was_injected_comes_from_no_pass(tmp_path: Path) -> None:
    options = replace(OPTIONS, inject="flip-bit:grad=weight,rank=0,step=1")
    found = searched(Bench(tmp_path, lambda applied, regions: True), options=options).found
    answer = list(describe_answer(found, options.inject, None, [], "batch"))
    assert answer[0] == (
        "no pass: the difference is there without any, tracing alone included, as "
        "flip-bit:grad=weight,rank=0,step=1 is injected"
    )
    assert found.result is not None and found.result.first_divergence is not None
    assert found.result.first_divergence.pass_ is None


def test_where_a_later_pass_undoes_a_difference_the_answer_is_an_edge_all_the_same(tmp_path: Path) -> None:
    def defect(applied: Sequence[str], regions: set[str]) -> bool:
        return "overlap" in applied or ("tag_memory" in applied and "rematerialize" not in applied)

    found = searched(Bench(tmp_path, defect)).found
    assert (found.equal, found.blamed) in {("clean_up", "tag_memory"), (MINE, "overlap")}
    verdicts = {probe.applied: probe.verdict for probe in found.probes}
    assert verdicts[f"until {found.equal}"] == Verdict.EQUAL
    assert verdicts[f"until {found.blamed}"] == Verdict.DIFFERENT


# -- what cannot be judged ------------------------------------------------------------------------------


def test_a_prefix_that_a_pass_refuses_ends_the_search_with_what_is_known(tmp_path: Path) -> None:
    bench = Bench(tmp_path, defect_of("overlap"), refuse=lambda applied: applied[-1:] == ["bucket"])
    found = searched(bench).found
    assert found.problem == "a prefix could not be judged\nPassError: a pass refuses the graph"
    assert (found.blamed, found.suspects) == (None, ("chunk", "bucket", MINE, "overlap", "concretize_symbols"))
    assert found.probes[-1].verdict == Verdict.ERROR
    assert status_of(found) == 3
    assert list(describe_answer(found, None, None, [], "batch")) == [
        "not found: a prefix could not be judged\nPassError: a pass refuses the graph",
        f"it is one of: chunk, bucket, {MINE}, overlap, concretize_symbols",
    ]


def test_a_case_that_cannot_be_judged_itself_is_not_searched(tmp_path: Path) -> None:
    bench = Bench(tmp_path, refuse=lambda applied: "overlap" in applied)
    found = searched(bench).found
    assert found.problem == "the case itself is ERROR\nPassError: a pass refuses the graph"
    assert (found.blamed, len(found.probes), status_of(found)) == (None, 1, 3)


def test_noise_is_no_pass(tmp_path: Path) -> None:
    found = searched(Bench(tmp_path, is_noisy=True)).found
    assert found.problem is not None and found.problem.startswith("the case itself is NONDETERMINISTIC\n")
    assert status_of(found) == 3


def test_a_prefix_with_too_little_to_compare_is_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Bench._rows

    def without_losses(self: Bench, case: Case, system: str, applied: Sequence[str]) -> Iterator[tuple[Key, Record]]:
        is_prefix = case.pipeline.until is not None
        return (
            (key, record) for key, record in rows(self, case, system, applied) if not is_prefix or key.kind != "loss"
        )

    monkeypatch.setattr(Bench, "_rows", without_losses)
    found = searched(Bench(tmp_path, defect_of("overlap"))).found
    assert found.problem == (
        "a prefix could not be judged\nRecordingError: until rematerialize: the recordings cannot be compared\n"
        "  found: the evidence is incomplete\n"
        "  no loss was compared at step 0, rank 0; step 0, rank 1; step 1, rank 0; step 1, rank 1"
    )
    assert found.blamed is None


# -- regions --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", REGIONS)
def test_of_the_chunk_pass_the_region_is_named_that_differs_alone(tmp_path: Path, bad: str) -> None:
    found = searched(Bench(tmp_path, lambda applied, regions: bad in regions)).found
    assert (found.blamed, found.region, found.region_problem) == ("chunk", bad, None)
    assert found.region_probes[-1].applied == f"chunk in {bad}, by itself"
    assert len(found.region_probes) <= math.ceil(math.log2(len(REGIONS))) + 1
    assert found.region_result is not None
    assert found.region_result.case.chunking == Chunking(dim="batch", modules="layers.*", only=(bad,))
    assert found.divergence is found.region_result.first_divergence
    assert found.divergence is not None and found.divergence.pass_ == "chunk"


@pytest.mark.parametrize(
    ("pair", "reported"),
    [
        ({"layers.0", "layers.2"}, "layers.3 alone is EQUAL; these differ when they are chunked together: REGIONS"),
        (
            {"layers.0", "layers.1"},
            "layers.1 alone is EQUAL; these differ when they are chunked together: layers.0, layers.1",
        ),
    ],
)
def test_regions_that_differ_only_together_are_reported_as_such(tmp_path: Path, pair: set[str], reported: str) -> None:
    found = searched(Bench(tmp_path, lambda applied, regions: pair <= regions)).found
    assert (found.blamed, found.region) == ("chunk", None)
    assert found.region_problem == reported.replace("REGIONS", ", ".join(REGIONS))
    assert status_of(found) == 1


def test_a_region_that_cannot_be_chunked_alone_leaves_the_pass_named(tmp_path: Path) -> None:
    bench = Bench(tmp_path, defect_of("chunk"))
    bench.refuse = lambda applied: bool(bench.asked[-1].case.chunking.only)
    found = searched(bench).found
    assert (found.blamed, found.region) == ("chunk", None)
    assert found.region_problem == "a region could not be judged\nPassError: a pass refuses the graph"


def test_regions_are_left_alone_where_the_reference_may_not_know_how_to_chunk_them(tmp_path: Path) -> None:
    found = searched(Bench(tmp_path, lambda applied, regions: True), replace(CASE, reference="mine:system")).found
    assert found.region is None


# -- references -----------------------------------------------------------------------------------------


def recording(graph: GraphIdentity | None = None) -> Recording:
    record = Record("0" * 32, "float32", (1,))
    keys = [Key(step, "grad", "weight", 0) for step in range(4)]
    return Recording(
        Manifest(case=CASE.to_dict(), steps=4, world_size=1, system="graph", graph=graph), dict.fromkeys(keys, record)
    )


def test_a_shared_reference_keeps_the_steps_of_the_prefix_alone() -> None:
    case = replace(CASE, steps=2, pipeline=replace(CASE.pipeline, until="bucket"))
    shared = shared_reference(recording(), case)
    assert [key.step for key in shared.records] == [0, 1]
    assert shared.manifest.case == case.to_dict()
    assert shared.manifest.steps == 2


def test_a_reference_with_a_graph_is_not_shared_between_prefixes() -> None:
    with pytest.raises(RecordingError) as error:
        shared_reference(recording(graph=GraphIdentity()), CASE)
    assert str(error.value) == (
        "RecordingError: a reference that has passes must be recorded for each prefix\n  found: graph"
    )


# -- how long second runs are ----------------------------------------------------------------------------


def result_and_steps(tmp_path: Path, inject: str | None = None, **values: Any) -> tuple[CaseResult, list[int]]:
    """What a case comes to whose systems differ, and how many steps its second runs took."""
    bench = Bench(tmp_path, defect_of("clean_up"), **values)
    options = replace(OPTIONS, control="up_to_difference", inject=inject)
    result = CaseRun(CASE, Placement(), bench, options, lambda event: None).result()
    return result, [asked.case.steps for asked in bench.asked if asked.arm == "control"]


def test_second_runs_of_a_search_take_the_steps_that_show_the_first_difference(tmp_path: Path) -> None:
    result, steps = result_and_steps(tmp_path)
    assert (result.verdict, steps) == (Verdict.DIFFERENT, [2, 2])
    assert result.control == {"reference": "EQUAL", "candidate": "EQUAL"}
    assert result.remarks[-1] == "second runs took 2 of 4 steps: those up to the first difference"


def test_second_runs_of_a_search_leave_what_it_needs_of_that_step(tmp_path: Path) -> None:
    bench = Bench(tmp_path, defect_of("clean_up"))
    CaseRun(CASE, Placement(), bench, replace(OPTIONS, control="up_to_difference"), lambda event: None).result()
    assert [(run.arm, run.watch is not None) for run in bench.asked] == [
        ("first", False),
        ("first", False),
        ("control", True),
        ("control", True),
    ]
    replay = Replay(step=1, log=True, record=Key(1, "loss", "weight", 0), spare=SPARE_BYTES)
    folders = [bench.work.resolve() / "batch" / f"{role}.archives1" for role in ("reference", "candidate")]
    assert [run.watch for run in bench.asked[2:]] == [LoggedStep(replay=replay, folder=folder) for folder in folders]


def test_a_second_run_that_fails_as_its_calls_are_logged_is_made_once_more_without_and_that_is_reported(
    tmp_path: Path,
) -> None:
    class Unlogged(Bench):
        def ask(self, request: Any, timeout: float, on_event: Callable[..., None] = lambda event: None) -> Any:
            if getattr(request, "watch", None) and request.system == "graph":
                self.asked.append(request)
                raise RankError("no calls can be logged")
            return super().ask(request, timeout, on_event)

    bench = Unlogged(tmp_path, defect_of("clean_up"))
    options = replace(OPTIONS, control="up_to_difference")
    result = CaseRun(CASE, Placement(), bench, options, lambda event: None).result()
    assert (result.verdict, result.control) == (Verdict.DIFFERENT, {"reference": "EQUAL", "candidate": "EQUAL"})
    assert result.remarks[-1] == (
        "a second run of candidate graph failed while its calls were logged, and was made again without: "
        "no calls can be logged"
    )
    assert next(request.arm for request in bench.asked if request.replay) == "replay1", "the search replays, then"


def test_noise_shows_in_as_few_steps(tmp_path: Path) -> None:
    result, steps = result_and_steps(tmp_path, is_noisy=True, bad_step=3)
    assert (result.verdict, steps) == (Verdict.NONDETERMINISTIC, [1, 1])


def test_a_fault_that_strikes_later_is_waited_for(tmp_path: Path) -> None:
    result, steps = result_and_steps(tmp_path, inject="flip-bit:rank=0,step=3,grad=weight")
    assert (result.verdict, steps) == (Verdict.DIFFERENT, [4, 4])
    assert not any("second runs" in remark for remark in result.remarks)
