from __future__ import annotations

from dataclasses import replace

import pytest

from bitproof.harness.records import PassReport, Score, Shard
from bitproof.harness.report import markdown


def test_a_shard_says_how_much_was_selected(make_report, make_result):
    one = make_result("one")
    shard = Shard(index=2, count=3, selection=(one.case, make_result("two").case))
    text = markdown.render(make_report(one, shard=shard))
    assert text.splitlines()[2:5] == [
        "Exit status 0: every case got its expected verdict.",
        "",
        "Shard 2/3 of 2 selected cases.",
    ]


def test_the_verdict_table_comes_first_and_details_are_folded(report):
    text = markdown.render(report)
    header = text.index("| case")
    assert header < text.index("<details>")
    rows = [line for line in text[header : text.index("<details>")].splitlines() if line.startswith("|")]
    assert [row.split("|")[1].strip() for row in rows[2:]] == ["good", "bad", "meant", "broken", "lost"]
    assert text.count("<details>") == text.count("<summary>") == 6


def test_the_headline_shows_the_exit_status_in_words(make_report, make_result):
    assert "Exit status 0: every case got its expected verdict." in markdown.render(make_report(make_result()))
    bad = make_report(make_result(verdict="DIFFERENT"))
    assert "Exit status 1: some case did not get its expected verdict." in markdown.render(bad)
    assert "No case was run." in markdown.render(make_report())


def test_details_hold_losses_divergence_times_passes_environment_and_replay(make_report, make_result):
    text = markdown.render(make_report(make_result(verdict="DIFFERENT"), options=("--steps", "2")))
    squeezed = " ".join(text.split())
    for part in (
        "bitproof run -k moe_seq --steps 2",
        "| 0 | 10.500000 | 0x1.5000000000000p+3 | 0x1.5000000000000p+3 | yes |",
        "| max_ulp | 1 |",
        "| passes.chunk | 0.500 |",
        "| pass | seconds | nodes before | nodes after |",
        "| chunk | 0.500 | 10 | 20 |",
        "| torch | 2.13.0 |",
        "| grad | 320 | 3 |",
        "| candidate | EQUAL |",
    ):
        assert part in squeezed


def test_a_loss_that_one_side_lacks_is_reported(make_report, make_result):
    result = make_result(verdict="UNVERIFIED", losses={"reference": ["0x1p+0", "0x1p+1"], "candidate": ["0x1p+0"]})
    assert "| 1 | 2.000000 | 0x1p+1 | missing | **no** |" in " ".join(markdown.render(make_report(result)).split())


def test_cases_that_are_not_as_expected_are_reported_first(report):
    text = markdown.render(report)
    assert text.index("<summary>bad: ") < text.index("<summary>good: ")


def test_hostile_text_neither_ends_its_fence_nor_breaks_a_table(report):
    text = markdown.render(report)
    start = text.index("````text\nTraceback ```")
    assert "</details>" in text[start : text.index("\n````\n", start)]
    assert "layers.1.moe.gate\\|w" in text


def test_a_name_that_spells_a_picture_or_a_link_is_shown_as_it_is_spelled(make_report, make_result):
    spelled = "![i](https://example.com/i.png)"
    text = markdown.render(make_report(make_result(), remarks=(f"{spelled} differs",)))
    assert "**![i\\](https:<span>/</span>/example.com/i.png) differs**" in text
    assert spelled not in text


def test_a_long_error_is_cut_in_the_middle(make_report, make_result):
    error = "START" + "x" * 100_000 + "END"
    text = markdown.render(make_report(make_result(verdict="ERROR", error=error)))
    assert len(text) < 2 * markdown.MAX_ERROR_CHARS
    assert "START" in text and "END" in text
    assert "84008 characters left out" in text


def test_a_summary_stays_below_what_ci_systems_take(make_report, make_result):
    results = [make_result(f"case{i}", "ERROR", error="x" * 50_000) for i in range(100)]
    text = markdown.render(make_report(*results))
    assert len(text.encode()) < 2**20
    assert "more cases are left out here; report.json has them." in text
    assert "| case99 " in text


def test_results_outside_a_run_are_summarized_too(make_result):
    assert "Exit status 1" in markdown.summarize([make_result(verdict="DIFFERENT")])


def test_what_a_pass_was_reported_found_and_changed_is_folded_below_the_table(make_report, make_result):
    entry = PassReport(
        "bucket",
        seconds=0.25,
        nodes_before=30,
        nodes_after=20,
        settings={"dim": "batch", "early": False},
        facts={"saved": 3, "buckets": [{"group": "fsdp", "members": ["a", "b|"]}, {"group": "EP"}], "none": None},
        changed={"all_gather": [40, 8], "cat": [0, 8]},
    )
    plain = PassReport("clean_up", seconds=0.0, nodes_before=30, nodes_after=30)
    text = markdown.render(make_report(make_result(passes=[plain, entry])))
    assert "<summary>pass clean_up</summary>" not in text
    details = " ".join(text[text.index("<summary>pass bucket</summary>") :].split())
    for part in (
        "settings: | what | value | |:-------|:--------| | dim | batch | | early | False |",
        "| saved | 3 | | buckets[0].group | fsdp | | buckets[0].members | a, b\\| |",
        "| buckets[1].group | EP | | none | |",
        "calls: | operator | before | after | change |",
        "| all_gather | 40 | 8 | -32 | | cat | 0 | 8 | +8 |",
    ):
        assert part in details, details


def test_a_pass_with_a_great_deal_to_report_is_cut(make_report, make_result):
    facts = {"moved": [{"node": index} for index in range(1000)], "long": ["x" * 100] * 1000}
    entry = PassReport("overlap", 0, 1, 1, facts=facts)
    text = markdown.render(make_report(make_result(passes=[entry])))
    assert len(text) < 20_000
    assert "| moved[99].node | 99 " in text and "moved[100]" not in text
    assert "901 more, in report.json" in text


def test_the_evidence_of_a_cause_is_reported(make_report, localized):
    text = " ".join(markdown.render(make_report(localized)).split())
    for part in (
        "Elements of the tensor by ULPs: | ULPs | elements | |:-------|:-----------| | 0 | 998 | | 1 | 1 | | 3-4 | 1 |",
        "| [0, 7] | 0x3f80 | 0x3f84 | 1 | 1.03125 |",
        "Elements of the blamed call's output by ULPs: | ULPs | elements | |:-------|:-----------| | 0 | 7 | | 1 | 1 |",
        "| [5] | 0xbf80 | 0xbf81 | | |",
        "### Tensors that differ | kind | tensor | steps | first step | ranks |",
        "| grad | layers.1.moe.gate\\|w | 2 | 0 | 0-7 | | param | layers.1.moe.gate\\|w | 1 | 1 | 0-1, 3 |",
    ):
        assert part in text, part


def test_of_very_many_tensors_that_differ_the_first_are_listed(make_report, make_result):
    names = {f"w{i}": {"0": [0]} for i in range(markdown.MAX_TENSORS + 3)}
    counts = {"loss": 0, "grad": len(names), "param": 0, "buffer": 0, "optimizer": 0}
    result = make_result("bad", "DIFFERENT", differing={"grad": names}, mismatched=counts)
    text = " ".join(markdown.render(make_report(result)).split())
    assert "| w49 | 1 | 0 | 0 |" in text and "| w50 |" not in text
    assert "| ... | 3 more, in report.json |" in text


def test_a_monstrous_report_stays_below_the_limit_in_bytes_and_points_at_the_rest(make_report, make_result, localized):
    """Everything that has no bound of its own, in characters of four bytes and in ones that cannot be encoded."""
    wide, odd = "\U0001d54f" * 20_000, "\ud800" * 20_000
    facts = {"passes": [PassReport(wide, 1, 1, 2, facts={wide: wide})]}
    cases = [make_result(f"case{i}", "ERROR", error=wide if i % 2 else odd) for i in range(200)]
    cases += [
        make_result(f"long{i}", "DIFFERENT", first_divergence=replace(localized.first_divergence, name=wide))
        for i in range(3)
    ]
    cases += [make_result("passes", **facts), make_result("small")]
    environment = {wide: odd, "many": {str(i): wide for i in range(200)}}
    report = make_report(
        *cases, environment=environment, not_run={f"not{i}": wide for i in range(200)}, options=(wide,)
    )
    text = markdown.render(report)
    assert len(text.encode(errors="backslashreplace")) <= markdown.MAX_BYTES < 2**20
    assert text.index("| case0 ") < text.index("<details>")
    assert "more rows are left out here; report.json has them." in text
    assert "more cases are left out here; report.json has them." in text
    assert text.count("<details>") == text.count("</details>")


def test_a_run_that_was_given_faults_says_what_came_of_them(make_report, make_result):
    score = Score(faults=3, killed=2, equivalents=1, places=(1, 2), seconds=4.2)
    text = markdown.render(make_report(make_result(), faults=score))
    assert "Exit status 1: a fault was not caught, or a rewrite that keeps every bit was flagged." in text
    assert "**bitproof faults: 2 of 3 faults killed, 0 of 1 equivalents flagged, " in text
    text = markdown.render(make_report(make_result(verdict="DIFFERENT"), faults=score))
    assert "Exit status 1: some case did not get its expected verdict." in text


ORDER, NATIVE = "in rank order by one Triton kernel", "in NCCL's own order"


@pytest.mark.parametrize(
    ("sums", "reported"),
    [
        ({"reference": ORDER, "candidate": ORDER}, f", sums over ranks {ORDER}"),
        (
            {"reference": ORDER, "candidate": NATIVE},
            f", reference's sums over ranks {ORDER}, candidate's sums over ranks {NATIVE}",
        ),
        ({"candidate": ORDER}, f", candidate's sums over ranks {ORDER}"),
        ({}, ""),
    ],
)
def test_how_ranks_added_stands_beside_what_carried_their_collectives(make_report, make_result, sums, reported):
    text = markdown.render(make_report(make_result(sums_over_ranks=sums)))
    assert f"8 ranks, 20 steps, cpu, gloo{reported}\n" in text
