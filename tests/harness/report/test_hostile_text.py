"""Text of others, put into every field of a report, is dead in every form; so is what other commands print of it."""

from __future__ import annotations

import copy
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from bitproof.harness.cli import main
from bitproof.harness.errors import BitproofError
from bitproof.harness.records import Report
from bitproof.harness.report import json as report_json
from bitproof.harness.report import markdown, terminal
from bitproof.harness.report.ci import comment, junit, sarif
from bitproof.harness.report.html import document
from bitproof.harness.runtime.output import SafeStream, safe_output, shown
from tests.harness.report.chromium import find_chromium, running
from tests.harness.report.everything import (
    CI_COMMANDS,
    HOSTILE,
    check_markdown,
    check_shown,
    check_terminal,
    empty_fields,
    everything,
    put,
    renamed,
    texts_in,
)
from tests.harness.report.html.test_document import Page
from tests.harness.report.results import CLOSENESS, DRIFT

ROOT = Path(__file__).parents[3]
ALL = "\n".join(HOSTILE)
SHORT = "<i>\x1b|`\n"
ELEMENTS = {
    *("html", "head", "meta", "title", "style", "body", "main", "h1", "h2", "h3", "h4", "h5", "p", "dl", "dt", "dd"),
    *("details", "summary", "div", "span", "table", "thead", "tbody", "tr", "th", "td", "pre", "code", "strong", "a"),
    *("figure", "figcaption", "svg", "br", "header", "polyline", "line", "circle", "text"),
}
ATTRIBUTES = {
    *("lang", "charset", "name", "content", "http-equiv", "class", "id", "style", "href", "title", "open", "scope"),
    *("tabindex", "role", "aria-label", "aria-hidden", "colspan", "viewbox", "points", "x1", "x2", "y1", "y2"),
    *("x", "y", "cx", "cy", "r", "width", "height", "text-anchor"),
}


@pytest.fixture
def full(localized, make_result) -> Report:
    return everything(localized, make_result, CLOSENESS, DRIFT)


@pytest.fixture
def values(full) -> dict[str, Any]:
    return report_json.to_dict(full)


def is_accepted(values: dict[str, Any]) -> bool:
    try:
        report_json.parse(json.dumps(values))
    except BitproofError as error:
        check_shown(shown(str(error)))
        return False
    return True


def hostile_everywhere(values: dict[str, Any], text: str) -> tuple[dict[str, Any], int]:
    """A report with a hostile text in every field that takes a short one, and how many these are."""
    found, taken = values, []
    paths = sorted((path for path, _ in texts_in(values)), key=lambda path: (path[-1] == "KEY", -len(path)))
    groups = [paths[at : at + 16] for at in range(0, len(paths), 16)]
    while groups:
        tried, group = copy.deepcopy(found), groups.pop(0)
        for path in group:
            (renamed if path[-1] == "KEY" else put)(tried, path, SHORT)
        if is_accepted(tried):
            found, taken = tried, [*taken, *group]
        elif len(group) > 1:  # names in tables last, the innermost first: paths of what is left stay as they are
            groups[:0] = [group[: len(group) // 2], group[len(group) // 2 :]]
    found = copy.deepcopy(values)
    for path in taken:
        (renamed if path[-1] == "KEY" else put)(found, path, text)
    return found, len(taken)


_MADE: list[str] = []


@pytest.fixture
def hostile(values) -> Report:
    """One text that is all of them, in every field that takes a text: so many that a test cannot pass by refusal."""
    if not _MADE:
        found, count = hostile_everywhere(values, ALL)
        assert count > 100, count
        _MADE.append(json.dumps(found))
    return report_json.parse(_MADE[0])


def of_a_users_system(report: Report) -> Report:
    """The report with a candidate of whose model nothing is known: counts that no model of ours has are refused."""
    cases = [replace(each, case=replace(each.case, candidate="mine.py:make")) for each in report.cases]
    return replace(report, cases=cases)


def test_the_report_of_these_tests_leaves_no_field_empty(full):
    assert report_json.parse(report_json.render(full)) == full
    assert empty_fields(full) == set()


def test_what_names_a_place_or_a_run_takes_no_other_text(values):
    for path, expected in (
        (("run_id",), "a run's id, such as 20260102T030405Z-abcdef"),
        (("cases", 0, "device"), "'cpu', 'cuda', 'auto' or 'unknown'"),
        (("cases", 0, "backend"), "'gloo', 'nccl' or 'unknown'"),
        (("cases", 0, "collectives"), "'shared', 'gloo', 'nccl' or 'native'"),
    ):
        tried = copy.deepcopy(values)
        put(tried, path, "<img src=x>")
        with pytest.raises(BitproofError) as error:
            report_json.parse(json.dumps(tried))
        field = "report" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
        assert error.value.what == f"{field} is damaged"
        assert str(error.value.expected).startswith(expected)


def test_markdown_is_dead(hostile):
    check_markdown(markdown.render(hostile))


def test_html_has_our_elements_and_attributes_alone(hostile):
    text = document.render(hostile)
    check_shown(text)
    page = Page(text)
    assert {tag for tag, _, _ in page.elements} <= ELEMENTS
    assert {name for _, found, _ in page.elements for name in found} <= ATTRIBUTES
    for _, found, _ in page.elements:
        assert re.fullmatch(r"(width:\d+%)?", found.get("style") or "")
        assert (found.get("href") or "logs/").startswith(("logs/", "#case-", "report.", "junit.xml"))
    assert "evil.example" in text and "{{ 7*7 }}" in text


def test_junit_has_our_elements_alone_and_shows_what_was_there(hostile):
    text = junit.render(hostile)
    check_shown(text)
    found = list(ElementTree.fromstring(text).iter())
    assert {each.tag for each in found} <= {
        *("testsuites", "testsuite", "properties", "property", "testcase", "failure", "error", "skipped", "system-out"),
    }
    assert any("<script>" in (each.text or "") for each in found)


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_terminal_and_a_ci_log_obey_nothing(hostile, is_terminal, monkeypatch):
    stream = io.StringIO()
    stream.isatty = lambda: is_terminal
    monkeypatch.setenv("TERM", "xterm-256color")
    terminal.print_report(hostile, SafeStream(stream))
    assert ("\x1b[" in stream.getvalue()) == is_terminal, "only where there is a terminal are there colours"
    check_terminal(stream.getvalue())
    assert "\\x1b[31mred" in stream.getvalue()


def test_json_is_ascii_and_says_the_same_after_the_gate_of_standard_output(hostile):
    text = report_json.render(hostile)
    assert text.isascii()
    check_shown(text)
    assert not CI_COMMANDS.search(shown(text))
    assert json.loads(shown(text)) == json.loads(text)


@pytest.mark.parametrize("name", ["md", "html", "junit", "json", "sarif", "comment"])
def test_each_format_that_report_prints_is_dead_in_a_ci_log(hostile, tmp_path, capsys, name):
    (tmp_path / "report.json").write_text(report_json.render(of_a_users_system(hostile)))
    assert main(["report", str(tmp_path), "--format", name]) == 0
    check_terminal(capsys.readouterr().out)


def test_a_comment_is_dead(hostile):
    check_markdown(comment.render(hostile))
    check_markdown(comment.render(hostile, replace(hostile, cases=hostile.cases[:1])))


def test_sarif_is_ascii_and_no_text_of_others_is_an_address_in_it(hostile):
    text = sarif.render(hostile)
    assert text.isascii()
    places = [place for result in json.loads(text)["runs"][0]["results"] for place in result["locations"]]
    assert all(
        "//" not in place.get("physicalLocation", {"artifactLocation": {"uri": ""}})["artifactLocation"]["uri"]
        for place in places
    )


def test_annotations_are_one_command_a_line_and_no_text_of_others_ends_one_or_begins_another(hostile, tmp_path, capsys):
    (tmp_path / "report.json").write_text(report_json.render(of_a_users_system(hostile)))
    assert main(["report", str(tmp_path), "--format", "annotations"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 2
    for line in lines:
        check_shown(line)
        assert re.fullmatch(r"::error (file=[^,:]+,line=\d+,)?title=[^,:]+::[^\n]+", line), line


def test_each_hostile_text_alone_is_dead_in_a_line_of_markdown_wherever_it_stands():
    from bitproof.harness.report.markdown_text import Strong, code_block, folded, inline, strong, table_of

    for text in HOSTILE:
        row = [text, Strong(text), "end"]
        for page in (
            inline(text), strong(text), f"# {inline(text)}", folded(text, code_block(text)),
            table_of(("a", text, "c"), [row, row]), code_block(text),
        ):  # fmt: skip
            check_markdown(page)
        table = table_of(("a", "b", "c"), [row])
        assert _cells(table) == 3, table


def _cells(table: str) -> int:
    from markdown_it import MarkdownIt

    return sum(token.type == "td_open" for token in MarkdownIt("commonmark").enable("table").parse(table))


def test_every_text_of_every_command_passes_the_gate():
    """What writes around `SafeStream.write` or makes a console of its own would have to be found by hand."""
    around = {}
    for path in sorted((ROOT / "harness").rglob("*.py")):
        text = path.read_text()
        if found := re.findall(r"\bConsole\(|write_as_it_is|sys\.__std|os\.write\([12],|\.buffer\.write", text):
            around[str(path.relative_to(ROOT))] = sorted(set(found))
    assert around == {
        "harness/powers/shrink/standalone/own_systems.py": ["os.write(1,"],  # in a file of two systems
        "harness/powers/shrink/standalone/template.py": ["os.write(1,"],  # in a file of one difference
        "harness/processes/forked.py": ["os.write(2,"],  # made printable, from a process that ends
        "harness/runtime/interrupts.py": ["os.write(2,"],  # words of our own, from a signal's handler
        "harness/runtime/output.py": ["write_as_it_is"],
    }


def test_a_command_that_fails_on_foreign_text_says_so_without_obeying_it(tmp_path, capsys):
    (tmp_path / "report.json").write_text(json.dumps({"schema": 1, ALL: ALL, "run_id": ALL}))
    assert main(["report", str(tmp_path)]) == 3
    check_terminal(capsys.readouterr().err)


def test_a_print_while_bars_are_shown_passes_the_gate_too(monkeypatch):
    from bitproof.harness.report.progress import LiveProgress

    stream = io.StringIO()
    stream.isatty = lambda: True
    monkeypatch.setattr("sys.stdout", stream)
    monkeypatch.setenv("TERM", "xterm-256color")
    import sys

    with safe_output(), LiveProgress(1, sys.stdout):
        print("\x1b[31mred\x1b]8;;http://evil.example\x07link")
    assert "\\x1b[31mred\\x1b]8;;http://evil.example\\x07link" in stream.getvalue()
    assert "\x1b[31m" not in stream.getvalue() and "\x1b]8" not in stream.getvalue()


@pytest.mark.slow
@pytest.mark.ranks
def test_a_browser_loads_and_runs_nothing_of_it(hostile, tmp_path):
    program = find_chromium()
    if program is None:
        pytest.skip("no Chromium is installed")
    page = tmp_path / "report.html"
    page.write_text(document.render(hostile), encoding="utf-8")
    with running(program, tmp_path) as browser:
        browser.open(page.as_uri())
        seen = browser.evaluate(
            "({scripts: document.scripts.length, images: document.images.length, title: document.title,"
            " tags: [...new Set([...document.querySelectorAll('*')].map(e => e.localName))]})"
        )
        asked = [reported["request"]["url"] for reported in browser.events_of("Network.requestWillBeSent")]
        dialogs = browser.events_of("Page.javascriptDialogOpening")
    assert (seen["scripts"], seen["images"]) == (0, 0)
    assert set(seen["tags"]) <= ELEMENTS
    assert asked == [page.as_uri()] and dialogs == []
