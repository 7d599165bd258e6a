"""`bitproof faults` as it is called; in the slow lane, every row of the catalogue struck and run on two ranks."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from bitproof.builtin_cases import CASES
from bitproof.harness.case import Parallelism
from bitproof.harness.cli import main
from bitproof.harness.disturb.faults.catalogue import CATALOGUE
from bitproof.harness.errors import UsageError
from bitproof.harness.powers.mutants.command import choose, homes, list_faults, status_of
from bitproof.harness.records import FaultOutcome, FaultsFound, Verdict
from tests.harness.powers.mutants.test_report import EQUAL, KILLED, LOST, SURVIVED
from tests.small import small

pytestmark = pytest.mark.ranks


def test_names_and_families_choose_rows_and_others_are_refused():
    assert [row.name for row in choose(["tokens-not-counted"])] == ["tokens-not-counted"]
    assert {row.family for row in choose(["moe", "optimizer"])} == {"moe", "optimizer"}
    assert choose([]) == list(CATALOGUE.values())
    with pytest.raises(UsageError, match="no fault and no family is named tokens"):
        choose(["tokens"])


def test_a_listed_row_says_what_a_case_needs_for_it():
    [line] = list_faults(choose(["counts-not-summed-over-ranks"]))
    assert line == (
        "counts-not-summed-over-ranks (moe): each rank balances by its own tokens only "
        "[a model with experts; 2 ranks or more]"
    )


def test_the_list_is_printed_and_nothing_runs(capsys):
    assert main(["faults", "--list", "--fault", "optimizer"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == sum(row.family == "optimizer" for row in CATALOGUE.values())


def test_a_page_without_a_place_for_the_table_is_refused_before_anything_runs(tmp_path, capsys):
    (tmp_path / "page.md").write_text("nothing")
    for file, text in (("page.md", "has no place for a table of faults"), ("absent.md", "cannot read the page")):
        arguments = ["faults", "--page", str(tmp_path / file), "--report-dir", str(tmp_path / "reports")]
        assert main(arguments) == 2
        assert text in capsys.readouterr().err
    assert main([*arguments, "--fault", "optimizer"]) == 2
    assert "--page writes the table of all faults" in capsys.readouterr().err
    assert not (tmp_path / "reports").exists()


class Result:
    """What of a case's result the status depends on."""

    def __init__(self, verdict):
        self.verdict = verdict


def test_the_status_is_that_of_the_worst():
    def status(*outcomes: FaultOutcome, verdict=Verdict.EQUAL, problem=None):
        return status_of(FaultsFound(outcomes=list(outcomes), problem=problem), [Result(verdict)])

    assert status(KILLED, EQUAL, LOST) == 0
    assert status(KILLED, SURVIVED) == 1
    assert status(KILLED, replace(SURVIVED, status="unjudged")) == 3
    assert status(KILLED, verdict=Verdict.DIFFERENT) == 3
    assert status(KILLED, problem="interrupted") == 3
    assert status() == 3


def written(folder, name, ranks=2, **changes):
    """A small case's file: one layer, few ranks."""
    case = small(CASES[name], changes.pop("layers", 1))
    parallelism = Parallelism(world_size=ranks, ep=2 - ranks % 2, tp=case.parallelism.tp)
    case = replace(case, parallelism=parallelism, name=f"{name}_small", **changes)
    file = folder / f"{case.name}.json"
    file.write_text(json.dumps(case.to_dict()))
    return str(file)


def run(folder, case, *faults, steps=2):
    chosen = [part for name in faults for part in ("--fault", name)]
    arguments = ["faults", "--case", case, *chosen, "--steps", str(steps), "--device", "cpu"]
    status = main([*arguments, "--report-dir", str(folder / "reports")])
    return status, json.loads((folder / "reports" / "latest" / "faults.json").read_text())


@pytest.mark.slow
def test_a_fault_is_killed_and_blamed_where_it_struck_and_an_equivalent_agrees(tmp_path, capsys):
    status, found = run(tmp_path, written(tmp_path, "moe_seq"), "tokens-not-counted", "negated-twice", steps=1)
    assert status == 0
    fault, equivalent = found["outcomes"]
    assert (fault["status"], fault["place_right"], fault["operator_right"]) == ("killed", True, True)
    assert fault["kinds"] == ["param", "buffer"] or "buffer" in fault["kinds"]
    assert (equivalent["status"], equivalent["verdict"]) == ("equal", "EQUAL")
    assert "1 of 1 faults killed, 0 of 1 equivalents flagged" in capsys.readouterr().out
    assert (tmp_path / "reports" / "latest" / "faults.md").is_file()


@pytest.mark.slow
def test_a_call_goes_on_from_an_earlier_one_and_what_shows_late_is_killed_too(tmp_path):
    case = written(tmp_path, "moe_seq")
    _, first = run(tmp_path, case, "zeros-from-the-second-step")
    assert first["outcomes"][0]["first"].startswith("step 1, rank 0")
    resumed = ("--resume", str(tmp_path / "reports" / "latest"))
    chosen = ("--fault", "zeros-from-the-second-step", "--fault", "relu-for-silu", "--steps", "2", "--device", "cpu")
    main(["faults", "--case", case, *chosen, *resumed, "--report-dir", str(tmp_path / "more")])
    both = json.loads((tmp_path / "more" / "latest" / "faults.json").read_text())
    assert both["outcomes"][0] == first["outcomes"][0] and both["calls"] == 2
    assert [outcome["fault"] for outcome in both["outcomes"][1:]] == ["relu-for-silu"]
    assert [outcome["operator_right"] for outcome in both["outcomes"]] == [True, True]


def test_a_fault_goes_first_where_it_should_be_seen_and_nowhere_that_it_cannot_strike():
    chosen = [CASES[name] for name in ("moe_seq", "transformer_batch", "blocks_batch_sight")]

    def names(fault):
        return [case.name for case in homes(CATALOGUE[fault], chosen)]

    assert names("tokens-not-counted") == ["moe_seq", "transformer_batch", "blocks_batch_sight"]
    assert names("chunk-1-uses-chunk-0s-positions") == ["blocks_batch_sight", "transformer_batch"]
    assert names("gathered-parts-exchanged") == []


@pytest.mark.slow
def test_sums_and_shares_that_tensor_ranks_get_wrong_are_killed_and_blamed_where_they_struck(tmp_path):
    status, found = run(tmp_path, written(tmp_path, "tp_ep_shared"), "tensor", steps=1)
    assert status == 0
    struck = [outcome for outcome in found["outcomes"] if outcome["status"] != "not struck"]
    assert len(struck) == 6, "two of the family need a divided sequence"
    for outcome in struck:
        assert (outcome["status"], outcome["place_right"], outcome["operator_right"]) == ("killed", True, True), outcome


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks", "changes"),
    [
        ("moe_seq", 2, {}),
        ("blocks_batch_float32", 4, {}),
        ("blocks_batch_offload", 2, {"layers": 2}),
        ("blocks_batch_bucketed_float32", 2, {}),
    ],
    ids=["moe_seq", "float32", "offload", "bucketed"],
)
def test_faults_are_killed_and_no_equivalent_is_flagged(tmp_path, name, ranks, changes):
    _, found = run(tmp_path, written(tmp_path, name, ranks, **changes))
    struck = [x for x in found["outcomes"] if x["status"] != "not struck"]
    assert [x["fault"] for x in struck if x["status"] in ("flagged", "unjudged")] == []
    survivors = {x["fault"] for x in struck if x["status"] == "survived"}
    reported = {x["fault"] for x in struck if x["reason"] and x["reason"].startswith("this case cannot see it")}
    # On 2 ranks in bfloat16 these sums are exact, as the page of faults says; in float32 they are not.
    exact = {"gradients-added-before-reduction"} if name == "moe_seq" else set()
    assert survivors - reported <= {"reciprocal-root-in-two-steps", *exact}, "of few elements and steps"
    right = [x["place_right"] for x in struck if x["place_right"] is not None]
    assert right.count(True) >= 0.9 * len(right)


@pytest.mark.slow
def test_faults_of_loops_are_killed_where_bits_must_agree_and_where_sums_may_be_regrouped(tmp_path):
    wanted = {
        "fsdp_observed": "shards-exchanged",
        "ring_two": "stale-keys-in-backward",
        "resume_observed": "generator-not-restored",
        "schedules_gpipe": "stage-reads-the-micro-batch-before",
    }
    chosen = [word for name in wanted.values() for word in ("--fault", name)]
    selected = ["-k", " or ".join(wanted), "--report-dir", str(tmp_path)]
    assert main(["faults", *selected, *chosen, "--device", "cpu"]) == 0
    found = json.loads((tmp_path / "latest" / "faults.json").read_text())["outcomes"]
    struck = {x["case"]: x for x in found if x["status"] != "not struck"}
    assert {case: x["fault"] for case, x in struck.items()} == wanted
    assert {x["status"] for x in struck.values()} == {"killed"}
    assert all(x["place_right"] for x in struck.values()), struck
