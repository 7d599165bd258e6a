from __future__ import annotations

import json
from dataclasses import replace

from bitproof.harness.report.ci import sarif

# sarif-schema-2.1.0.json: what an object must have, and what we write of what it may have, each with its type.
REQUIRED = {
    "": {"version", "runs"},
    "runs": {"tool"},
    "tool": {"driver"},
    "driver": {"name"},
    "rules": {"id"},
    "results": {"message"},
    "invocations": {"executionSuccessful"},
}
KNOWN = {
    "": {"$schema": str, "version": str, "runs": list},
    "runs": {"tool": dict, "invocations": list, "results": list, "columnKind": str, "properties": dict},
    "tool": {"driver": dict},
    "driver": {"name": str, "semanticVersion": str, "rules": list},
    "rules": {"id": str, "shortDescription": dict},
    "shortDescription": {"text": str},
    "invocations": {"executionSuccessful": bool, "exitCode": int, "exitCodeDescription": str},
    "results": {
        "ruleId": str, "ruleIndex": int, "level": str, "message": dict, "partialFingerprints": dict, "locations": list,
    },
    "message": {"text": str},
    "locations": {"logicalLocations": list, "physicalLocation": dict},
    "logicalLocations": {"name": str, "kind": str},
    "physicalLocation": {"artifactLocation": dict, "region": dict},
    "artifactLocation": {"uri": str},
    "region": {"startLine": int},
}  # fmt: skip
FREE = ("properties", "partialFingerprints")


def faults(found: dict, name: str = "") -> list[str]:
    """What the schema does not allow, in an object and all below it."""
    wrong = [f"{name} lacks {field}" for field in REQUIRED.get(name, set()) - found.keys()]
    for field, value in found.items():
        kind = KNOWN[name].get(field)
        if kind is None or type(value) is not kind:
            wrong.append(f"{name} has {field} of {type(value).__name__}")
        elif field not in FREE:
            inner = value if kind is list else [value] if kind is dict else []
            wrong += [fault for each in inner for fault in faults(each, field)]
    return wrong


def run_of(report) -> dict:
    values = json.loads(sarif.render(report))
    assert faults(values) == [] and values["version"] == "2.1.0"
    [run] = values["runs"]
    names = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    for result in run["results"]:
        assert names[result["ruleIndex"]] == result["ruleId"] and result["level"] == "error"
        assert result["message"]["text"]
    return run


def test_the_check_of_these_tests_sees_what_the_schema_does_not_allow(report):
    values = json.loads(sarif.render(report))
    del values["runs"][0]["tool"]["driver"]["name"]
    values["runs"][0]["results"][0]["message"] = "text"
    values["runs"][0]["invocations"][0]["more"] = 1
    assert sorted(faults(values)) == [
        "driver lacks name", "invocations has more of int", "results has message of str",
    ]  # fmt: skip


def test_a_result_is_what_is_not_as_expected_and_a_run_that_judged_was_successful(report, make_report, make_result):
    run = run_of(report)
    assert [result["ruleId"] for result in run["results"]] == ["DIFFERENT", "ERROR", "UNVERIFIED"]
    assert run["invocations"][0]["executionSuccessful"] is False
    good = run_of(make_report(make_result()))
    assert (good["results"], good["invocations"][0]["exitCode"]) == ([], 0)


def test_a_result_has_the_file_and_line_of_the_call_to_blame(make_report, localized):
    [result] = run_of(make_report(localized))["results"]
    assert "to blame: gate<b> of layers.1.moe (backward, chunk 1, micro-batch 2, <b>)" in result["message"]["text"]
    [place] = result["locations"]
    assert place["physicalLocation"] == {"artifactLocation": {"uri": "moe.py"}, "region": {"startLine": 68}}
    assert place["logicalLocations"] == [{"name": "bad", "kind": "case"}]


def test_a_fingerprint_stays_with_the_run_the_line_and_the_values_and_changes_with_the_cause(make_report, localized):
    def fingerprint(result, **facts) -> str:
        [found] = run_of(replace(make_report(result), **facts))["results"]
        return found["partialFingerprints"]["bitproof/v1"]

    first = localized.first_divergence
    moved = replace(localized, first_divergence=replace(first, step=1, call=replace(first.call, source="a/moe.py:70")))
    other = replace(localized, first_divergence=replace(first, call=replace(first.call, operator="mul")))
    same = fingerprint(localized)
    assert fingerprint(localized, run_id="20270102T030405Z-fedcba") == same == fingerprint(moved)
    assert fingerprint(other) != same


def test_a_side_that_drifted_is_a_result_with_the_call_that_moved(make_report, make_result, make_baseline, localized):
    call = localized.first_divergence.call
    baseline = {"candidate": make_baseline("DRIFTED", call=call), "reference": make_baseline("MISSING")}
    found = run_of(make_report(make_result(baseline=baseline)))["results"]
    assert [result["ruleId"] for result in found] == ["CHECK"]
    assert "candidate graph: DRIFTED, first grad" in found[0]["message"]["text"]
    assert found[0]["locations"][0]["physicalLocation"]["region"] == {"startLine": 68}
