"""report.html of a real run, opened in a real browser: what a reader sees, on a phone and on a desk."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest

from bitproof.harness.case import Case
from bitproof.harness.commands.run import run_and_report
from bitproof.harness.options import RunOptions
from bitproof.harness.records import Report
from bitproof.harness.report import json as report_json
from bitproof.harness.report.html import document
from tests.harness.execute.test_launch import toy
from tests.harness.report.chromium import MISSING, Chromium, find_chromium, running
from tests.hosts import one_host

VERDICTS = {
    "steady": "EQUAL",
    "one_bit_off": "DIFFERENT",
    "noisy": "NONDETERMINISTIC",
    "raising": "ERROR",
    "near": "CLOSE",
}
FLEX = Case(name="flex", family="x", reference="eager", requires="cuda")
SIZES = [(360, "light"), (360, "dark"), (1200, "light"), (1200, "dark")]

# Texts whose contrast with what lies behind them is less than WCAG's 4.5 to 1.
FAINT = """(() => {
  const channels = color => color.match(/[\\d.]+/g).map(Number);
  const luminance = color => channels(color).slice(0, 3).map(c => c / 255)
    .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = element => {
    for (; element; element = element.parentElement) {
      const color = getComputedStyle(element).backgroundColor;
      if ((channels(color)[3] ?? 1) > 0) return color;
    }
    return "rgb(255, 255, 255)";
  };
  const faint = [];
  let seen = 0;
  for (const element of document.body.querySelectorAll("*")) {
    if (![...element.childNodes].some(node => node.nodeType === 3 && node.data.trim())) continue;
    if (!element.checkVisibility()) continue;
    seen += 1;
    const pair = [getComputedStyle(element).color, behind(element)].map(luminance).sort((a, b) => b - a);
    const contrast = (pair[0] + 0.05) / (pair[1] + 0.05);
    if (contrast < 4.5) faint.push([element.tagName, element.className, element.textContent.slice(0, 40), contrast]);
  }
  return {seen, faint};
})()"""

# Elements that reach beyond the page's right edge and that no box of their own scrolls.
WIDE = """[...document.body.querySelectorAll("*")]
  .filter(element => element.checkVisibility())
  .filter(element => element.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
  .filter(element => !element.closest(".box"))
  .map(element => element.outerHTML.slice(0, 80))"""

UNFOLD = "document.querySelectorAll('details').forEach(details => details.open = true)"


@dataclass
class Run:
    folder: Path
    report: Report

    @property
    def url(self) -> str:
        return (self.folder / "report.html").as_uri()


@pytest.fixture(scope="module")
def program() -> str:
    """The browser's path. Where there is none the test says so; in CI that is a failure."""
    path = find_chromium()
    if path is None and os.environ.get("CI"):
        pytest.fail(MISSING)
    return path or pytest.skip(MISSING)


@pytest.fixture(scope="module")
def browser(program, tmp_path_factory):
    with running(program, tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture(scope="module")
def run(program, tmp_path_factory) -> Run:
    """A case of nearly every verdict, from real ranks, and one case that was not run."""
    cases: list[Case] = [toy(name, name=name) for name in list(VERDICTS)[:4]]
    cases.append(replace(toy("one_bit_off", name="near"), expected="CLOSE", close_within=0.01))
    folder = tmp_path_factory.mktemp("reports")
    options = RunOptions(device="cpu", timeout=60.0, control="never")
    with one_host():
        assert (
            run_and_report(cases, options, folder, ["--steps", "4"], {"flex": "it needs <CUDA>"}, left_out=(FLEX,)) == 3
        )
    return Run(folder / "latest", report_json.read(folder / "latest" / "report.json"))


def complaints(browser: Chromium) -> list[object]:
    """Everything that went wrong on the page, in the browser's words."""
    thrown = browser.events_of("Runtime.exceptionThrown")
    return [*browser.events_of("Log.entryAdded"), *browser.events_of("Runtime.consoleAPICalled"), *thrown]


@pytest.mark.ranks
@pytest.mark.parametrize(("width", "scheme"), SIZES)
def test_the_page_loads_alone_and_fits_phone_and_desk_in_light_and_dark(browser, run, width, scheme):
    browser.open(run.url, width=width, scheme=scheme)
    browser.evaluate(UNFOLD)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate(WIDE) == []
    contrast = browser.evaluate(FAINT)
    assert contrast["seen"] > 200 and contrast["faint"] == []
    requests = [request["request"]["url"] for request in browser.events_of("Network.requestWillBeSent")]
    assert requests == [run.url]
    assert complaints(browser) == []
    assert browser.evaluate("document.scripts.length") == 0
    dark = browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(13, 17, 23)"
    assert dark == (scheme == "dark")


@pytest.mark.ranks
def test_the_verdict_of_every_case_is_in_sight(browser, run):
    browser.open(run.url)
    shown = browser.evaluate(
        "[...document.querySelector('table').querySelectorAll('tbody tr')].map(row => row.innerText.split('\\t'))"
    )
    assert {row[0]: row[1].split()[1] for row in shown} == VERDICTS
    summaries = browser.evaluate(
        "[...document.querySelectorAll('.case > summary')].filter(s => s.checkVisibility()).map(s => s.innerText)"
    )
    assert len(summaries) == 5
    for name, verdict in VERDICTS.items():
        assert any(name in text and verdict in text for text in summaries), (name, summaries)
    assert "it needs <CUDA>" in browser.evaluate("document.body.innerText")


@pytest.mark.ranks
def test_details_open_and_a_link_in_the_table_unfolds_its_case(browser, run):
    browser.open(run.url)
    is_open = "document.getElementById('case-steady').closest('details').open"
    assert browser.evaluate(is_open) is False, "it is as expected"
    assert browser.evaluate("document.getElementById('case-noisy').closest('details').open") is True
    browser.evaluate("document.querySelector('a[href=\"#case-steady\"]').click()")
    assert browser.evaluate(f"new Promise(r => setTimeout(r, 100)), {is_open}") is True
    logs = "document.querySelector('#case-steady .logs')"
    browser.evaluate(f"{logs}.querySelector('summary').click()")
    assert browser.evaluate(f"{logs}.querySelector('a').checkVisibility()") is True


@pytest.mark.ranks
def test_every_link_leads_to_a_file_of_the_run_or_to_a_place_on_the_page(browser, run):
    browser.open(run.url)
    places = browser.evaluate(
        "[...document.querySelectorAll('a[href^=\"#\"]')].map(a => !!document.querySelector(a.getAttribute('href')))"
    )
    assert places == [True] * (5 + 3), "five cases in the table, three of them explained above it"
    links = browser.evaluate("[...document.querySelectorAll('a:not([href^=\"#\"])')].map(a => a.href)")
    files = [Path(unquote(urlparse(link).path)) for link in links]
    assert [str(file) for file in files if not file.is_file()] == []
    logs = {file.resolve() for file in files if file.suffix == ".log"}
    assert logs == {file.resolve() for name in VERDICTS for file in (run.folder / "logs" / name).rglob("*.log")}


@pytest.mark.ranks
def test_the_heatmap_has_a_cell_for_every_tensor_and_step_and_a_color_for_every_share(browser, run):
    browser.open(run.url)
    [result] = [result for result in run.report.cases if result.case.name == "one_bit_off"]
    cells = browser.evaluate(
        "[...document.querySelectorAll('#case-one_bit_off .tensors tbody tr')].map(row => [row.cells[0].innerText, "
        "...[...row.cells].slice(1).map(cell => [cell.innerText, getComputedStyle(cell).backgroundColor])])"
    )
    by_name = {row[0]: [tuple(cell) for cell in row[1:-1]] for row in cells if len(row) > 1}
    assert set(by_name) == {name for names in result.differing.values() for name in names}
    assert all(len(row) == result.steps for row in by_name.values())
    agree, half = "rgb(227, 247, 232)", "rgb(255, 213, 150)"
    assert by_name["weight"][:2] == [("0", agree)] * 2
    assert by_name["weight"][2][1] == half, "one rank of two"
    kinds = browser.evaluate("document.querySelectorAll('#case-steady .kinds tbody td.h0').length")
    assert kinds == 4 * run.report.cases[0].steps, "buffers were not compared"


@pytest.mark.ranks
def test_what_is_folded_on_the_screen_is_printed(browser, run):
    browser.open(run.url, width=1000, media="print")
    heights = browser.evaluate("[...document.querySelectorAll('details.case > div')].map(d => d.checkVisibility())")
    assert heights == [True] * 5


@pytest.mark.ranks
def test_hostile_text_runs_nothing(browser, run, tmp_path):
    hostile = "<script>document.title = 'taken'</script><img src=x onerror=\"document.title = 'taken'\">"
    page = document.render(replace(run.report, cases=[replace(case, error=hostile) for case in run.report.cases]))
    (tmp_path / "report.html").write_text(page)
    browser.open((tmp_path / "report.html").as_uri())
    assert browser.evaluate("document.title").startswith("bitproof ")
    assert browser.evaluate("document.querySelectorAll('pre')[1].innerText") == hostile
    assert complaints(browser) == []


def test_the_checks_see_what_they_look_for(browser, tmp_path):
    """A page that does everything wrong: too wide, faint, chatty, and curious about the network."""
    (tmp_path / "bad.html").write_text(
        "<meta name=viewport content='width=device-width'><img src='http://example.invalid/x.png'>"
        "<p style='width:900px;color:#ccc;background:#fff'>wide and faint</p><script>console.error('oh')</script>"
    )
    browser.open((tmp_path / "bad.html").as_uri())
    assert browser.evaluate("document.documentElement.scrollWidth") > 360
    assert len(browser.evaluate(WIDE)) == 1
    assert len(browser.evaluate(FAINT)["faint"]) == 1
    assert len(browser.events_of("Network.requestWillBeSent")) == 2
    assert len(complaints(browser)) >= 2


@pytest.mark.parametrize(("ci", "outcome"), [("true", pytest.fail.Exception), ("", pytest.skip.Exception)])
def test_a_missing_browser_is_reported_and_in_ci_it_is_a_failure(monkeypatch, ci, outcome):
    monkeypatch.setenv("CI", ci)
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(outcome, match="Debian's package is `chromium`"):
        program.__wrapped__()
