from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

import pytest

from bitproof.harness.errors import UsageError
from bitproof.harness.history.database import add_runs, read_nights
from bitproof.harness.history.plot import BAD, GOOD, render_html, render_svg, write_plot
from bitproof.harness.history.trends import trends_of
from bitproof.harness.records import Divergence, Throughput, Verdict
from tests.harness.reports import ENVIRONMENT, case, result, write_report

SVG = "{http://www.w3.org/2000/svg}"
SPEED = Throughput(steps=2, step_seconds=0.5, spread_seconds=0.1)
EVIL = "</text><script>alert(1)</script>\x00&"


@pytest.fixture(scope="module")
def nights(tmp_path_factory):
    folder = tmp_path_factory.mktemp("history")
    place = Divergence(step=1, rank=0, kind="grad", name=EVIL)
    wanted = case("meant", expected="DIFFERENT", differs=("grad",))
    verdicts = [("EQUAL", {}), ("ERROR", {}), ("DIFFERENT", {"first_divergence": place})]
    runs = [
        write_report(
            folder,
            [result(case("near"), verdict, 10.0 + day, throughput={"candidate": replace(SPEED, tokens=256)}, **facts)]
            + [result(wanted, "DIFFERENT", throughput={"candidate": SPEED} if day else {})]
            + [result(case("new"))] * (day == 2),
            run_id=f"2026010{day + 1}T030405Z-abcdef",
            environment=ENVIRONMENT | ({"python": EVIL} if day == 2 else {}) | {"commit": f"{day}{EVIL}"},
        )
        for day, (verdict, facts) in enumerate(verdicts)
    ]
    add_runs(folder / "db", runs)
    return read_nights(folder / "db", 10)


@pytest.fixture(scope="module")
def picture(nights):
    return ElementTree.fromstring(render_svg(nights, trends_of(nights)))


def cells(picture):
    """Colour and letter of every cell, by what it says of itself."""
    return {
        group.find(f"{SVG}title").text: (group.find(f"{SVG}rect").get("fill"), group.find(f"{SVG}text").text)
        for group in picture.iter(f"{SVG}g")
        if group.find(f"{SVG}title") is not None
    }


def test_a_cell_tells_the_case_the_night_the_verdict_and_the_first_difference(picture):
    found = cells(picture)
    spelled = EVIL.replace("\x00", "\\x00")
    good = f"near, 2026-01-01 03:04 UTC, commit {'0' + spelled:.12}\nEQUAL, expected EQUAL\n10.0 s"
    bad = (
        f"near, 2026-01-03 03:04 UTC, commit {'2' + spelled:.12}\nDIFFERENT, expected EQUAL\n12.0 s\n"
        f"step 1, rank 0, grad {spelled}"
    )
    assert found[good] == (GOOD, "E")
    assert found[bad] == (BAD[Verdict.DIFFERENT], "D")
    meant = [cell for about, cell in found.items() if about.startswith("meant, ")]
    assert meant == [(GOOD, "D")] * 3
    assert [cell[1] for about, cell in found.items() if "UTC" in about and "near, " in about] == ["E", "X", "D"]
    assert len([about for about in found if about.startswith("new, ")]) == 1, "no cell where it was not run"
    statuses = [cell for about, cell in found.items() if "exit status" in about]
    assert [letter for _, letter in statuses] == ["0", "3", "1"]


def test_the_line_of_seconds_rises_with_them(picture):
    lines = [line.get("points").split() for line in picture.iter(f"{SVG}polyline")]
    assert [len(points) for points in lines] == [3, 3, 3, 2, 1], "seconds, and the candidate's steps where known"
    heights = [float(point.split(",")[1]) for point in lines[0]]
    assert heights == sorted(heights, reverse=True) and heights[0] > heights[2]
    flat = {point.split(",")[1] for point in lines[2]}
    assert len(flat) == 1


def test_figures_and_a_change_of_the_machine_are_told(picture):
    texts = [text.text for text in picture.iter(f"{SVG}text")]
    for expected in (
        "bitproof history: 3 nights, 2026-01-01 to 2026-01-03",
        "100%",
        "12.0",
        "x 1.14",
        "500.0",
        "512",
        "not known",
    ):
        assert expected in texts
    assert f"01-02 1{EVIL[:6]}" in texts, "date and commit"
    assert "1  2026-01-03: python none -> </text><script>alert(1)</script>\\x00&" in texts


def test_nothing_in_the_page_runs_or_is_loaded(nights):
    page = render_html(nights, trends_of(nights))
    assert page.startswith("<!doctype html>")
    assert "default-src 'none'" in page
    assert "<script" not in page and " src=" not in page and "href" not in page


def test_everything_lies_within_the_picture(picture):
    width, height = float(picture.get("width")), float(picture.get("height"))
    for text in picture.iter(f"{SVG}text"):
        if text.get("text-anchor") is None:
            assert float(text.get("x")) + 6.5 * len(text.text) <= width
        assert float(text.get("y")) <= height


def test_a_picture_of_one_night_has_a_dot_instead_of_a_line(nights):
    picture = ElementTree.fromstring(render_svg(nights[:1], trends_of(nights[:1])))
    assert len(list(picture.iter(f"{SVG}circle"))) == 3


def test_a_plot_is_written_by_the_name_of_its_file(nights, tmp_path):
    trends = trends_of(nights)
    write_plot(tmp_path / "new" / "plot.svg", nights, trends)
    write_plot(tmp_path / "plot.html", nights, trends)
    assert (tmp_path / "new" / "plot.svg").read_text().startswith("<svg ")
    assert (tmp_path / "plot.html").read_text().startswith("<!doctype html>")
    with pytest.raises(UsageError) as error:
        write_plot(tmp_path / "plot.png", nights, trends)
    assert str(error.value) == (
        "UsageError: a plot is a picture or a page\n"
        "  expected: a file named .svg or .html\n"
        f"  found: {tmp_path / 'plot.png'}"
    )
    with pytest.raises(UsageError) as error:
        write_plot(tmp_path / "plot.html" / "x.svg", nights, trends)
    assert str(error.value).startswith("UsageError: the plot cannot be written\n")
