from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from bitproof.harness.records import CaseSeconds
from bitproof.harness.report.ci import junit

# junit-10.xsd of Jenkins' xunit plugin: required attributes, others, and what an element may hold.
COUNTS = {"tests", "failures", "errors"}
SCHEMA = {
    "testsuites": (set(), {"name", "time"} | COUNTS, {"testsuite"}),
    "testsuite": (
        {"name"} | COUNTS,
        {"group", "time", "skipped", "timestamp", "hostname", "id", "package", "file", "log", "url"},
        {"testsuite", "properties", "testcase", "system-out", "system-err"},
    ),
    "properties": (set(), set(), {"property"}),
    "property": ({"name", "value"}, set(), set()),
    "testcase": ({"name"}, {"time", "classname", "group"}, {"skipped", "error", "failure", "system-out", "system-err"}),
    **dict.fromkeys(("skipped", "error", "failure"), (set(), {"type", "message"}, set())),
    **dict.fromkeys(("system-out", "system-err"), (set(), set(), set())),
}
TIME = re.compile(r"(([0-9]{0,3},)*[0-9]{3}|[0-9]{0,3})*(\.[0-9]*)?")


def faults(element: ElementTree.Element) -> list[str]:
    """What the schema does not allow, in an element and all below it."""
    required, optional, children = SCHEMA[element.tag]
    found = [f"{element.tag} lacks {name}" for name in sorted(required - set(element.keys()))]
    found += [f"{element.tag} has {name}" for name in sorted(set(element.keys()) - required - optional)]
    if "time" in element.attrib and not TIME.fullmatch(element.get("time", "")):
        found.append(f"{element.tag} took {element.get('time')}")
    for child in element:
        found += faults(child) if child.tag in children else [f"{element.tag} holds {child.tag}"]
    return found


def test_every_case_is_one_test_case_with_the_right_outcome(report):
    root = ElementTree.fromstring(junit.render(report).encode("utf-8", "strict"))
    outcomes = {case.get("name"): [child.tag for child in case] for case in root.iter("testcase")}
    assert outcomes == {"good": [], "bad": ["failure"], "meant": [], "broken": ["error"], "lost": ["error"]}
    suite = root.find("testsuite")
    assert [suite.get(name) for name in ("tests", "failures", "errors", "skipped")] == ["5", "1", "2", "0"]
    assert root.find("testsuite/testcase").get("classname") == "bitproof.chunking"
    assert root.find("testsuite/testcase").get("time") == "3.750"


def test_a_failure_names_the_first_divergence_and_the_replay(report):
    root = ElementTree.fromstring(junit.render(report))
    failure = root.find(".//failure")
    assert failure.get("type") == "DIFFERENT"
    assert failure.get("message") == (
        "DIFFERENT (grad, param), expected EQUAL; first at step 0, rank 3, grad layers.1.moe.gate|w"
    )
    assert failure.text.splitlines()[-1] == "bitproof run -k bad --steps 2"


def test_a_failure_names_the_call_to_blame_with_its_file_and_line(make_report, localized):
    failure = ElementTree.fromstring(junit.render(make_report(localized))).find(".//failure")
    message = failure.get("message")
    assert "; to blame: gate<b> of layers.1.moe (backward, chunk 1, micro-batch 2, <b>) on rank 3 " in message
    assert "moe.py:68)" in message


def test_control_characters_and_cdata_ends_stay_readable_in_well_formed_xml(report):
    root = ElementTree.fromstring(junit.render(report).encode("utf-8", "strict"))
    error = next(case for case in root.iter("testcase") if case.get("name") == "broken").find("error")
    assert "]]> \\x1b[31m \\x00 \\ud800 \\ufffe <b>&amp;" in error.text


def test_the_environment_is_kept_as_properties(make_report, make_result):
    report = make_report(make_result(), environment={"torch\x07": "2.13\x00"})
    root = ElementTree.fromstring(junit.render(report))
    properties = {entry.get("name"): entry.get("value") for entry in root.iter("property")}
    assert properties == {"run_id": report.run_id, "verdicts": "1 EQUAL", "torch\\x07": "2.13\\x00"}


def test_every_kind_of_outcome_is_valid_by_the_schema_of_ci_systems(report, make_result):
    report.not_run = {"regional\x00": "it needs CUDA\x1b"}
    report.cases.append(make_result("near", "CLOSE", expected="CLOSE"))
    report.cases.append(make_result("long", seconds=CaseSeconds(total=12345.6789)))
    root = ElementTree.fromstring(junit.render(report).encode("utf-8", "strict"))
    assert faults(root) == []
    assert {child.tag for case in root.iter("testcase") for child in case} == {
        *("failure", "error", "skipped", "system-out")
    }
    times = [float(case.get("time")) for case in root.iter("testcase")]
    assert [suite.get("time") for suite in (root, root[0])] == [f"{sum(times):.3f}"] * 2


def test_a_shard_without_cases_is_valid_too(make_report):
    assert faults(ElementTree.fromstring(junit.render(make_report()))) == []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda root: root.set("skipped", "0"), "testsuites has skipped"),
        (lambda root: root[0].set("time", "1 s"), "testsuite took 1 s"),
        (lambda root: root[0].attrib.pop("errors"), "testsuite lacks errors"),
        (lambda root: ElementTree.SubElement(root[0][-1], "properties"), "testcase holds properties"),
    ],
)
def test_the_schema_check_sees_what_the_schema_forbids(report, change, fault):
    root = ElementTree.fromstring(junit.render(report))
    change(root)
    assert faults(root) == [fault]
