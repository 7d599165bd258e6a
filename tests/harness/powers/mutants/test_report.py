"""Outcomes of faults, summed up and told."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from bitproof.harness.errors import RecordingError, UsageError
from bitproof.harness.powers.mutants.report import (
    BEGIN,
    END,
    by_family,
    line_of,
    read_found,
    render_json,
    render_markdown,
    summary_lines,
    table_into,
)
from bitproof.harness.records import BlamedCall, FaultOutcome, FaultsFound, Score, Verdict, Verification

KILLED = FaultOutcome(
    fault="relu-for-silu",
    family="numerics",
    is_fault=True,
    says="another activation",
    source="ours",
    case="moe_seq",
    ranks=2,
    steps=1,
    status="killed",
    verdict=Verdict.DIFFERENT,
    kinds=("loss", "grad"),
    kind_right=True,
    first="step 0, rank 0, loss loss",
    call=BlamedCall(operator="relu", module="layers.1.moe", direction="forward", chunk=1, rank=0),
    expected=("relu of layers.1.moe (forward, chunk 1)",),
    place_right=True,
    operator_right=True,
    seconds=1.5,
)
SURVIVED = replace(KILLED, fault="quiet", status="survived", verdict=Verdict.EQUAL, call=None, place_right=None)
SURVIVED = replace(SURVIVED, operator_right=None, kinds=(), kind_right=None)
ELSEWHERE = replace(KILLED, fault="astray", place_right=True, operator_right=False, rank_right=False)
EQUAL = replace(SURVIVED, fault="negated-twice", family="equivalent", is_fault=False, status="equal")
FLAGGED = replace(KILLED, fault="alarm", family="equivalent", is_fault=False, status="flagged", place_right=None)
FLAGGED = replace(FLAGGED, operator_right=None)
LOST = replace(SURVIVED, fault="lost", status="not struck", verdict=None, reason="it needs 3 ranks or more")


def test_a_score_counts_faults_and_equivalents_apart_and_what_struck_nothing_as_neither():
    score = Score.of([KILLED, SURVIVED, ELSEWHERE, EQUAL, FLAGGED, LOST])
    assert (score.faults, score.killed, score.equivalents, score.flagged) == (3, 2, 2, 1)
    assert (score.places, score.operators, score.ranks) == ((2, 2), (1, 2), (0, 1))
    assert score.seconds == 9.0


def test_a_line_says_what_was_blamed_and_what_was_expected_where_that_is_another_thing():
    assert line_of(KILLED) == (
        "relu-for-silu in moe_seq: killed, DIFFERENT in 1.5 s; blamed relu of layers.1.moe (forward, chunk 1) on rank 0"
    )
    assert line_of(ELSEWHERE).endswith("; expected relu of layers.1.moe (forward, chunk 1)")
    failed = replace(KILLED, call=None, reason="the replay that looks for the cause failed: no space\nleft")
    assert line_of(failed).endswith("in 1.5 s; the replay that looks for the cause failed: no space")
    assert line_of(LOST) == "lost in moe_seq: not struck, - in 1.5 s; it needs 3 ranks or more"


def test_verified_causes_are_counted_and_those_among_them_that_are_wrong():
    def with_status(outcome: FaultOutcome, status: str) -> FaultOutcome:
        found = Verification(status=status, tensors=9, differing=4, remaining=0, reverse=True)
        return replace(outcome, call=replace(outcome.call, verification=found))

    right, wrong = with_status(KILLED, "verified"), with_status(ELSEWHERE, "verified")
    score = Score.of([right, wrong, with_status(KILLED, "in part"), KILLED, SURVIVED])
    assert (score.verified, score.verified_wrong) == ((2, 3), 1), "one was not to be verified, one has no cause"
    assert "verified 2 of 3 (67%), verified but wrong 1, " in str(score)
    assert "verified" not in str(Score.of([KILLED]))
    assert line_of(right) == f"{line_of(KILLED)}, verified"
    impossible = replace(score, verified_wrong=3).first_impossible_share
    assert impossible is not None and impossible.name == "verified but wrong"


def test_of_many_expected_places_the_first_are_shown():
    places = tuple(f"mm of layers.{i} (forward)" for i in range(6))
    assert line_of(replace(ELSEWHERE, expected=places)).endswith("layers.3 (forward) or 2 others")


def test_families_have_a_row_each_and_all_of_them_one():
    rows = by_family([KILLED, SURVIVED, EQUAL])
    assert [row[:5] for row in rows] == [
        ("numerics", "2", "1 of 2 (50%)", "0", "0"),
        ("equivalent", "0", "-", "1", "0"),
        ("all", "2", "1 of 2 (50%)", "1", "0"),
    ]


def test_the_terminal_names_survivors_and_false_alarms():
    text = "\n".join(summary_lines(FaultsFound(outcomes=[KILLED, SURVIVED, ELSEWHERE, FLAGGED, LOST])))
    for title in ("survivors:\n  quiet", "false alarms:\n  alarm", "struck nothing:\n  lost", "elsewhere:\n  astray"):
        assert title in text
    assert text.endswith(str(Score.of([KILLED, SURVIVED, ELSEWHERE, FLAGGED, LOST])))
    assert "ended early: interrupted" in "\n".join(summary_lines(FaultsFound(problem="interrupted")))


def test_an_error_that_killed_is_reported_as_an_error():
    text = render_markdown(FaultsFound(outcomes=[replace(KILLED, verdict=Verdict.ERROR, kinds=(), call=None)]))
    assert "| killed (ERROR) |" in text


def test_json_has_every_outcome_and_markdown_a_row_each_without_breaking_its_table():
    found = FaultsFound(outcomes=[KILLED, replace(LOST, says="a | b\nc")])
    values = json.loads(render_json(found))
    assert [outcome["fault"] for outcome in values["outcomes"]] == ["relu-for-silu", "lost"]
    assert values["outcomes"][0]["call"]["operator"] == "relu"
    lines = render_markdown(found).splitlines()
    assert any(line.startswith("| relu-for-silu | another activation | ours |") for line in lines)
    assert any("a \\| b c" in line for line in lines)


def test_what_was_found_is_read_again_as_it_was_and_a_damaged_file_is_refused_by_its_field(tmp_path):
    found = FaultsFound(outcomes=[KILLED, EQUAL, LOST], problem="interrupted", cpu_seconds=90.0, own_digest="ab")
    file = tmp_path / "faults.json"
    file.write_text(render_json(found))
    assert read_found(file) == found
    file.write_text(render_json(found).replace('"status": "killed"', '"status": "slain"'))
    with pytest.raises(RecordingError, match=r"faults.outcomes\[0\].status is damaged"):
        read_found(file)
    file.write_text("{")
    with pytest.raises(RecordingError, match="a file of faults cannot be read"):
        read_found(file)
    with pytest.raises(RecordingError, match="it is a folder, not a regular file"):
        read_found(tmp_path)


def test_a_call_takes_over_what_this_code_judged_and_nothing_of_other_code():
    found = FaultsFound(outcomes=[KILLED, replace(SURVIVED, status="unjudged")], problem="late", own_digest="ab")
    taken = found.of_today("ab")
    assert (taken.outcomes, taken.problem, taken.calls) == ([KILLED], None, 2)
    assert taken.has("relu-for-silu") and taken.has("relu-for-silu", "moe_seq")
    assert not taken.has("relu-for-silu", "moe_batch") and not taken.has("quiet")
    with pytest.raises(UsageError, match="what an earlier call of faults found is of other code"):
        found.of_today("cd")


def test_a_page_gets_the_table_between_its_marks_and_one_without_marks_gets_none():
    page = f"before, of {BEGIN} and {END}\n{BEGIN}\nold\n{END}\nafter\n"
    found = FaultsFound(outcomes=[KILLED, SURVIVED], cpu_seconds=90.0)
    text = table_into(page, found, {"torch": "2.13.0", "cpu": "a processor"}, "bitproof faults")
    assert text.startswith(
        f"before, of {BEGIN} and {END}\n{BEGIN}\n\n"
        "`bitproof faults`, on torch 2.13.0, a processor, 1.5 minutes of CPU: 1 of 2"
    )
    assert text.endswith(f"\n\n{END}\nafter\n") and "old" not in text
    assert "| numerics | 2 | 1 of 2 (50%) |" in text and "Survivors:\n\n- quiet in moe_seq: survived" in text
    assert table_into(text, found, {"torch": "2.13.0", "cpu": "a processor"}, "bitproof faults") == text
    assert table_into("no place", found, {}, "") is None and table_into(f"{END} {BEGIN}", found, {}, "") is None
