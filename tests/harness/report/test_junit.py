from __future__ import annotations

from xml.etree import ElementTree

from harness.report import junit


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


def test_control_characters_and_cdata_ends_stay_readable_in_well_formed_xml(report):
    root = ElementTree.fromstring(junit.render(report).encode("utf-8", "strict"))
    error = next(case for case in root.iter("testcase") if case.get("name") == "broken").find("error")
    assert "]]> \\x1b[31m \\x00 \\ud800 \\ufffe <b>&amp;" in error.text


def test_the_environment_is_kept_as_properties(make_report, make_result):
    report = make_report(make_result(), environment={"torch\x07": "2.13\x00"})
    root = ElementTree.fromstring(junit.render(report))
    properties = {entry.get("name"): entry.get("value") for entry in root.iter("property")}
    assert properties == {"run_id": report.run_id, "verdicts": "1 EQUAL", "torch\\x07": "2.13\\x00"}
