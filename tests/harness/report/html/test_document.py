from __future__ import annotations

import re
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from bitproof.harness.case import USUAL_KINDS
from bitproof.harness.powers.baselines.records import BaselineResult, BaselineStatus
from bitproof.harness.powers.baselines.report import finding_of
from bitproof.harness.records import BlamedCall, CaseResult, PassReport, Shard
from bitproof.harness.report import json as report_json
from bitproof.harness.report.html import document

VOID = {"meta", "link", "br", "img", "input", "hr", "line", "polyline"}


class Page(HTMLParser):
    """Every element with its attributes and the text within it, in document order; tags must nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self._open: list[tuple[str, list[str]]] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attributes):
        words: list[str] = []
        self.elements.append((tag, dict(attributes), words))
        if tag not in VOID:
            self._open.append((tag, words))

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self._open.pop()[0] == tag

    def handle_data(self, data):
        for _, words in self._open:
            words.append(data)

    def texts(self, tag: str, **attributes: str) -> list[str]:
        """The texts of all elements of a tag that have these attributes (`class_`: one of its classes)."""
        wanted = attributes.pop("class_", None)
        return [
            " ".join("".join(words).split())
            for name, found, words in self.elements
            if name == tag
            and (wanted is None or wanted in (found.get("class") or "").split())
            and attributes.items() <= found.items()
        ]


@pytest.fixture
def page(make_report, make_result, localized):
    """The page of a case that differs and one that is as expected."""
    return Page(document.render(make_report(make_result("good"), localized, not_run={"flex": "it needs <CUDA>"})))


def rows(page: Page, label: str) -> list[list[str]]:
    """The rows of the first table in a box of that label."""
    start = next(i for i, (_, found, _) in enumerate(page.elements) if found.get("aria-label") == label)
    table: list[list[str]] = []
    for tag, _, words in page.elements[start + 1 :]:
        if tag == "table" and table:
            break
        if tag == "tr":
            table.append([])
        if tag in ("td", "th"):
            table[-1].append(" ".join("".join(words).split()))
        if tag in ("h4", "h5", "details", "p"):
            break
    return table


def test_every_case_has_a_row_with_its_verdict_in_words_and_signs(page):
    assert rows(page, "Verdicts")[1:] == [
        ["good", "= EQUAL", "EQUAL", "yes", "1,520", "0", "3.8", ""],
        [
            "bad",
            "≠ DIFFERENT (grad, param)",
            "EQUAL",
            "no",
            "228",
            "12",
            "3.8",
            "step 0, rank 3, grad layers.1.moe.gate|w",
        ],
    ]
    assert rows(page, "Cases that were not run")[1:] == [["flex", "it needs <CUDA>"]]
    assert page.texts("p", class_="status") == [
        "Exit status 1: some case did not get its expected verdict. 1 EQUAL, 1 DIFFERENT, 1 not run."
    ]


def test_cases_that_are_not_as_expected_come_first_and_unfolded(page):
    folds = [found for tag, found, _ in page.elements if tag == "details" and found.get("class") == "case"]
    assert page.texts("h3") == ["bad", "good"]
    assert ["open" in found for found in folds] == [True, False]


def test_the_heatmap_shows_kinds_and_steps_for_every_case(page):
    assert rows(page, "Records by kind and step") == [
        ["kind", "compared", "differ", "0", "1", "2"],
        ["loss", "24", "0", "0", "0", "0"],
        ["grad", "48", "9", "1", "8", "0"],
        ["param", "48", "3", "0", "3", "0"],
        ["buffer", "12", "0", "0", "0", "0"],
        ["optimizer", "96", "0", "0", "0", "0"],
    ]
    assert [text for text in page.texts("p") if "recorded tensors" in text] == [
        "All 1,520 recorded tensors agree in every bit, at every step, on every rank."
    ]


def test_the_heatmap_shows_on_how_many_and_on_which_ranks_a_tensor_differs(page):
    assert rows(page, "Tensors that differ, by step") == [
        ["tensor", "0", "1", "2", "ranks"],
        ["grad"],
        ["layers.1.moe.gate|w", "1", "8", "0", "0-7"],
        ["param"],
        ["layers.1.moe.gate|w", "0", "3", "0", "0-1, 3"],
    ]
    tooltips = [
        (found["class"], found.get("title"))
        for tag, found, _ in page.elements
        if found.get("title", "").startswith("rank ") and tag == "td"
    ]
    assert tooltips == [("h1", "rank 3"), ("h2", "rank 0-1, 3")]


def test_the_cause_is_reported_with_bits_values_and_histogram(page):
    assert rows(page, "Elements by ULPs")[1:] == [["0", "998", ""], ["1", "1", ""], ["3-4", "1", ""]]
    assert rows(page, "The first elements that differ")[1:] == [
        ["[0, 7]", "0x3f80", "0x3f84", "1", "1.03125"],
        ["[9, 99]", "0x4000", "0x4001", "2", "2.015625"],
    ]
    assert page.texts("h5")[2:4] == [
        "The tensor: 2 of 1,000 elements differ, by 4 ULPs at most",
        "The blamed call's output: 1 of 8 elements differ, by 1 ULP at most",
    ]


def test_the_chain_of_calls_stands_in_a_lane_for_each_rank(page):
    assert rows(page, "From the blamed call to this tensor") == [
        ["rank 0", "rank 3", "module", "direction", "changed", "line"],
        ["", "gate<b>", "layers.1.moe", "backward, chunk 1, micro-batch 2", "", ""],
        ["4 calls left out"],
        ["", "all_reduce", "the step itself", "backward, |", "", "moe.py:70"],
        ["all_reduce", "", "the step itself", "backward", "3 of 8 elements differ, by 2 ULPs at most", "moe.py:70"],
    ]


def test_ranks_are_lanes_around_the_blamed_call(page):
    calls = [found for tag, found, _ in page.elements if tag == "circle" and found["class"] != "alike"]
    assert [found["class"] for found in calls] == ["culprit", "call", "call"]
    heights = [int(found["cy"]) for found in calls]
    assert heights[0] == heights[1] > heights[2], "rank 0 has the first lane"
    (way,) = (found["points"] for tag, found, _ in page.elements if found.get("class") == "way")
    assert way == " ".join(f"{found['cx']},{found['cy']}" for found in calls)


def drawn(page: Page) -> list[tuple[str, list[tuple[float, ...]]]]:
    """Every line of the page's charts: its side, and its points as x and y."""
    return [
        (found["class"], [tuple(map(float, point.split(","))) for point in found["points"].split()])
        for tag, found, _ in page.elements
        if tag == "polyline" and found["class"] != "way"
    ]


def test_losses_are_reported_drawn_and_listed(page):
    assert "They differ at 1 of 3 steps, first at step 1: 0x1p+2 in the reference, 0x1.8p+2 in the candidate." in (
        page.texts("p")
    )
    lines = drawn(page)
    reference, candidate = (next(points for side, points in lines if side == name) for name in document.ROLES)
    left, middle, right = (x for x, _ in reference)
    assert left < middle < right and middle - left == pytest.approx(right - middle)
    assert [x for x, _ in candidate] == [left, middle, right]
    (top, low, bottom), (_, high, _) = ([y for _, y in points] for points in (reference, candidate))
    assert top < high < low < bottom, "y grows downwards, and the candidate's loss is the larger one"
    assert [candidate[0], candidate[2]] == [reference[0], reference[2]]
    assert [float(found["x1"]) for tag, found, _ in page.elements if tag == "line" and "class" in found] == [middle]
    assert rows(page, "Losses")[2] == ["1", "4.000000", "0x1p+2", "0x1.8p+2", "no"]


def test_a_loss_that_is_not_finite_or_missing_leaves_a_gap(make_report, make_result):
    losses = {"reference": ["0x1p+0", "nan", "0x1p+1", "0x1p+0"], "candidate": ["0x1p+0", "inf"]}
    page = Page(document.render(make_report(make_result(verdict="UNVERIFIED", losses=losses))))
    (first_side, first), (second_side, second), (last_side, last) = drawn(page)
    assert (first_side, second_side, last_side) == ("reference", "reference", "candidate")
    assert first == last and len(first) == 1, "a loss of its own is a dot, and both begin with the same"
    (third_x, third_y), (fourth_x, fourth_y) = second
    assert third_x - first[0][0] == pytest.approx(2 * (fourth_x - third_x), rel=0.01), "step 1 is left out"
    assert fourth_y == first[0][1] > third_y
    assert rows(page, "Losses")[3] == ["2", "2.000000", "0x1p+1", "missing", "no"]


def test_passes_have_times_nodes_and_what_they_show(make_report, make_result):
    entry = PassReport(
        "bucket",
        seconds=0.25,
        nodes_before=3000,
        nodes_after=2000,
        settings={"dim": "batch"},
        facts={"buckets": [{"group": "fsdp", "members": ["a", "b|"]}]},
        changed={"all_gather": [40, 8], "cat": [0, 8]},
    )
    slow = PassReport("chunk", seconds=0.5, nodes_before=1, nodes_after=1)
    page = Page(document.render(make_report(make_result(passes=[entry, slow]))))
    assert rows(page, "Passes")[1:] == [["bucket", "0.250", "3,000 → 2,000", "-1,000"], ["chunk", "0.500", "1 → 1", ""]]
    bars = [found["style"] for _, found, _ in page.elements if "thin" in (found.get("class") or "")]
    assert bars == ["width:50%", "width:100%"]
    assert page.texts("dl", class_="settings") == ["dimbatch"]
    assert page.texts("dl", class_="facts") == ["buckets[0].groupfsdpbuckets[0].membersa, b|"]
    assert page.texts("p", class_="calls") == ["all_gather 40 → 8, cat 0 → 8"]


def test_logs_are_linked_within_the_run_folder(page):
    links = [found["href"] for tag, found, _ in page.elements if tag == "a"]
    assert [link for link in links if link.startswith("logs/")] == [
        "logs/bad/eager_chunked/rank0.log",
        "logs/bad/graph/rank0.log",
        "logs/bad/graph/rank0.control.log",
    ]
    assert {"report.json", "report.md", "junit.xml", "#case-good", "#case-bad"} <= set(links)


def test_close_is_reported_with_its_bound_and_histogram(make_report, make_result):
    page = Page(document.render(make_report(make_result("near", "CLOSE", expected="CLOSE"))))
    assert "Largest relative error 0.00312 (bound 0.01) at step 1, rank 3, grad layers.1.moe.gate|w." in page.texts("p")
    assert rows(page, "Elements by ULPs, for each kind") == [
        ["ULPs", "loss", "grad", "param", "buffer", "optimizer"],
        ["0", "1,000", "990", "1,000", "1,000", "1,000"],
        ["1", "0", "7", "0", "0", "0"],
        ["3-4", "0", "3", "0", "0", "0"],
    ]


def test_controls_memory_options_environment_and_replay_are_reported(make_report, make_result):
    page = Page(document.render(make_report(make_result(), options=("--steps", "2"))))
    assert rows(page, "Control")[1:] == [["reference", "EQUAL"], ["candidate", "EQUAL"]]
    assert "candidate 12.5 MiB" in page.texts("dd")
    assert page.texts("pre", class_="replay") == ["bitproof run -k moe_seq --steps 2"]
    assert "--steps 2" in page.texts("code")
    assert ["torch", "2.13.0"] in rows(page, "Environment")


def test_how_ranks_added_is_reported_with_what_carried_their_collectives(make_report, make_result):
    sums = dict.fromkeys(("reference", "candidate"), "in rank order by additions")
    lines = Page(document.render(make_report(make_result(sums_over_ranks=sums)))).texts("dd")
    assert sum(text.endswith("gloo, sums over ranks in rank order by additions") for text in lines) == 1


def test_the_blamed_pass_and_baselines_are_reported(make_report, localized):
    result = replace(localized, first_divergence=replace(localized.first_divergence, pass_="chunk"))
    status = BaselineStatus.NOT_COMPARABLE
    about = BaselineResult(status=status, path="b", reasons=["torch <2>"])
    result.checks = {"baseline": finding_of({"candidate": about}, {"candidate": "graph"})}
    page = Page(document.render(make_report(result)))
    assert "The pass to blame: chunk." in page.texts("p")
    assert "candidate graph against b: torch <2>" in page.texts("p")


def test_a_system_that_parts_from_itself_is_reported_by_its_runs(make_report, localized):
    tensor = replace(localized.first_divergence.tensor, candidate_type="x[2]")
    first = replace(localized.first_divergence, between="candidate against itself under stress", tensor=tensor)
    result = replace(localized, first_divergence=first, stress={"reference": None, "candidate": "DIFFERENT"})
    page = Page(document.render(make_report(result, remarks=("--stress: <b>",))))
    where = "step 0, rank 3, grad layers.1.moe.gate|w (graph against itself under stress)"
    assert f"{where} first run: bfloat16[10, 100], second run: x[2]" in page.texts("p")
    assert rows(page, "The first elements that differ")[0] == ["index", *["first run", "second run"] * 2]
    assert rows(page, "Stress")[1:] == [["reference", "not run"], ["candidate", "DIFFERENT"]]
    assert "--stress: <b>" in page.texts("p")


def test_a_shard_says_so(make_report, make_result):
    result = make_result()
    page = Page(document.render(make_report(result, shard=Shard(index=2, count=3, selection=(result.case,) * 4))))
    assert "Shard 2/3 of 4 selected cases." in page.texts("p")


def test_nothing_from_a_record_becomes_markup(report):
    hostile = "<script>alert(1)</script>\"'><img src=x onerror=y> </pre> \x1b[31m \x00 \ud800 \ufffe"
    call = BlamedCall(operator=hostile, how=hostile)
    first = replace(report.cases[1].first_divergence, name=hostile, call=call)
    entry = PassReport(hostile, 1, 1, 2, facts={hostile: hostile}, changed={hostile: [1, 2]})
    case = replace(
        report.cases[1],
        first_divergence=first,
        error=hostile,
        passes=[entry],
        differing={"grad": {hostile: {"0": [0, 1, 2]}}, "param": {hostile: {"0": [0, 1]}}},
        logs=[f"logs/{hostile}/rank0.log"],
        backend=hostile,
    )
    page_text = document.render(
        replace(
            report,
            cases=[case],
            run_id=hostile,
            options=(hostile,),
            not_run={hostile: hostile},
            environment={hostile: [hostile]},
        )
    )
    page = Page(page_text)
    assert {tag for tag, _, _ in page.elements} & {"script", "img", "iframe", "object", "embed", "link"} == set()
    assert not any(name.startswith("on") for _, found, _ in page.elements for name in found)
    [error] = [text for text in page.texts("pre") if text.startswith("<script>")]
    assert error == "<script>alert(1)</script>\"'><img src=x onerror=y> </pre> \\x1b[31m \\x00 \\ud800 \\ufffe"
    page_text.encode()


def test_the_page_asks_nothing_of_the_network_and_runs_no_script(page, report):
    text = document.render(report)
    assert not re.search(r"https?://|//\w|url\(|@import|<script|<link|<img|<iframe|javascript:", text)
    assert not [found for _, found, _ in page.elements if "src" in found]


def test_tables_have_headers_with_a_scope(page):
    headers = [found for tag, found, _ in page.elements if tag == "th"]
    assert headers and all(found.get("scope") in ("col", "row", "rowgroup") for found in headers)


def many_differ(make_result, name: str, names: int, steps: int, ranks: int, **facts: Any) -> CaseResult:
    found = {
        f"layers.{i}.moe.some_module.weight": {str(s): list(range(ranks)) for s in range(steps)} for i in range(names)
    }
    count = names * steps * ranks
    return make_result(
        name,
        "DIFFERENT",
        steps=steps,
        differing={"grad": found},
        mismatched={"loss": 0, "grad": count, "param": 0, "buffer": 0, "optimizer": 0},
        world_size=ranks,
        differing_kinds=("grad",),
        compared=dict.fromkeys(USUAL_KINDS, steps * ranks)
        | {"grad": count, "param": count, "optimizer": count, "buffer": 0},
        losses={side: ["0x1p+0"] * steps for side in ("reference", "candidate")},
        **facts,
    )


def test_twenty_thousand_keys_fit_a_page_which_says_what_it_leaves_out(make_report, make_result):
    report = make_report(many_differ(make_result, "huge", 1000, 20, 1))
    assert report_json.parse(report_json.render(report)) == report
    text = document.render(report)
    assert len(text.encode()) < 2_000_000
    page = Page(text)
    assert len([row for row in rows(page, "Tensors that differ, by step") if len(row) == 22]) == 1 + 230
    assert "770 more tensors differ; report.json has them." in page.texts("p")


@pytest.mark.parametrize(
    ("wanted", "total", "share"),
    [([], 9, 0), ([1, 2, 3], 9, 3), ([1, 8, 9], 9, 4), ([9, 9, 9], 9, 3), ([0, 20], 9, 9), ([0, 0], 9, 0)],
)
def test_what_one_case_does_not_need_of_the_page_others_get(wanted, total, share):
    assert document.fair_share(wanted, total) == share


def test_a_few_cases_that_differ_are_shown_whole_though_others_are_many(make_report, make_result):
    cases = [
        many_differ(make_result, "wide", 300, 5, 8),
        *(many_differ(make_result, f"bad{i}", 1, 5, 8) for i in range(30)),
    ]
    page = Page(document.render(make_report(*cases)))
    assert len([row for row in rows(page, "Tensors that differ, by step") if len(row) == 7]) == 1 + 300


def test_a_report_of_64_cases_is_quick_and_small(make_report, make_result, localized):
    changed = {f"operator{i}": [i, 2 * i] for i in range(40)}
    entry = PassReport("chunk", 0.5, 1, 9, facts={"x": list(range(50))}, changed=changed)
    logs = [f"logs/case/{side}/rank{rank}{arm}.log" for side in "ab" for rank in range(8) for arm in ("", ".control")]
    losses = {side: [(10.0 - i).hex() for i in range(5)] for side in ("reference", "candidate")}
    facts = {"passes": [entry] * 9, "logs": logs}
    cases = [make_result(f"case{i}", losses=losses, steps=5, **facts) for i in range(44)]
    cases += [many_differ(make_result, f"bad{i}", 200, 5, 8, **facts) for i in range(10)]
    cases += [
        make_result(f"broken{i}", "ERROR", error="x" * 60_000, losses={side: [] for side in losses}) for i in range(10)
    ]
    report = make_report(*cases)
    began = time.process_time()
    text = document.render(report)
    assert time.process_time() - began < 5.0, "it takes half a second of the CPU, and more where others keep it busy"
    assert len(text.encode()) < 1_000_000


def test_what_a_report_does_not_list_is_not_shown_as_agreeing(make_report, make_result):
    result = many_differ(make_result, "cut", 2, 3, 8, differing_left_out=5)
    result.differing["grad"]["layers.1.moe.some_module.weight"].pop("2")
    result.mismatched["grad"] -= 3
    page = Page(document.render(make_report(result)))
    assert rows(page, "Records by kind and step")[2] == ["grad", "48", "45", "16", "16", "8+"]
    assert rows(page, "Records by kind and step")[3] == ["param", "48", "0", "0", "0", "?"]
    assert rows(page, "Tensors that differ, by step")[3] == ["layers.1.moe.some_module.weight", "8", "8", "?", "0-7"]
    assert any(text.startswith("5 later records that differ are not listed") for text in page.texts("p"))


def test_a_report_from_before_keys_were_listed_shows_counts_alone(make_report, make_result):
    page = Page(document.render(make_report(make_result(verdict="DIFFERENT"))))
    assert rows(page, "Records by kind and step")[:3] == [
        ["kind", "compared", "differ"],
        ["loss", "160", "0"],
        ["grad", "320", "3"],
    ]


def test_many_steps_become_ranges(make_report, make_result):
    page = Page(document.render(make_report(many_differ(make_result, "long", 1, 100, 2))))
    header, *_ = rows(page, "Tensors that differ, by step")
    assert header[:3] + header[-2:] == ["tensor", "0-2", "3-5", "99", "ranks"]
    assert rows(page, "Records by kind and step")[2][3:5] == ["6", "6"]


def test_a_report_without_cases_is_a_page_too(make_report):
    assert "Exit status 3: some case could not be judged. No case was run." in Page(
        document.render(make_report())
    ).texts("p")


def test_the_template_travels_with_the_package():
    config = (Path(__file__).parents[4] / "pyproject.toml").read_text()
    assert document.TEMPLATE.name.endswith(".jinja")
    assert 'package-data."bitproof.harness.report.html" = ["*.jinja"]' in config
