"""What the core's checks found is a title and blocks, and every page shows all of them."""

from __future__ import annotations

from typing import Any

import pytest

from bitproof.harness.records import BUCKETS, CaseResult, Report, Table
from bitproof.harness.report import blocks, markdown
from bitproof.harness.report.html import document
from bitproof.harness.report.sections import histogram, sections
from tests.harness.report.everything import everything
from tests.harness.report.results import CLOSENESS
from tests.harness.report.test_hostile_text import DRIFT

TITLES = ["Closeness", "LayoutBounds", "Control", "Stress", "Throughput", "Partition", "Placements"]


@pytest.fixture
def whole(localized: CaseResult, make_result: Any) -> Report:
    return everything(localized, make_result, CLOSENESS, DRIFT)


def test_both_pages_show_every_section_of_a_case(whole: Report) -> None:
    shown, page = markdown.render(whole), document.render(whole)
    found = {title for result in whole.cases for title, _ in sections(result)}
    assert found == {*TITLES}
    for title in TITLES:
        assert f"### {title}\n\n" in shown and f"<h4>{title}</h4>" in page
    for text in ("bytes of a rank", "2 tensors have another layout", "nodes of the joint graph"):
        assert text in page.casefold() and text in shown.casefold(), "report.html showed them in no place before"


def test_a_plain_case_has_its_control_alone(make_result: Any) -> None:
    [(title, [table])] = sections(make_result())
    assert (title, table.rows) == ("Control", (("reference", "EQUAL"), ("candidate", "EQUAL")))


def test_a_table_without_a_title_has_no_line_for_one() -> None:
    assert [*blocks.markdown([Table("", ("a",), (("1",),))])] == [*blocks.markdown([Table("t", ("a",), (("1",),))])][1:]


def test_rows_of_a_histogram_that_are_zero_in_every_column_are_left_out() -> None:
    table = histogram("elements", {"grad": {"0": 1200, "1": 0}, "param": {"3-4": 1}})
    assert table.rows == (("0", "1,200", "0"), ("3-4", "0", "1")) and "1" in BUCKETS
