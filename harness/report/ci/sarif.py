"""Write report.sarif: unexpected results as SARIF 2.1.0, which code hosts show next to the code.

A result has the blamed call's file and line, and a fingerprint for later runs. Untrusted texts are escaped.
"""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

from bitproof.harness import __version__
from bitproof.harness.printable import printable
from bitproof.harness.records import Report
from bitproof.harness.report.ci.problems import RULES, Objection, objections
from bitproof.harness.report.status import SUCCESS, UNEXPECTED
from bitproof.harness.report.text import shorten, tally

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
MAX_MESSAGE_CHARS = 4_000


def render(report: Report) -> str:
    names = list(RULES)
    driver = {
        "name": "bitproof",
        "semanticVersion": __version__,
        "rules": [{"id": name, "shortDescription": {"text": f"{about}."}} for name, about in RULES.items()],
    }
    run = {
        "tool": {"driver": driver},
        "invocations": [
            {
                # Whether every case was judged; unexpected verdicts are results.
                "executionSuccessful": report.exit_status in (SUCCESS, UNEXPECTED),
                "exitCode": report.exit_status,
                "exitCodeDescription": tally(report),
            }
        ],
        "results": [_result(objection, names) for objection in objections(report)],
        "columnKind": "unicodeCodePoints",
        "properties": {"runId": report.run_id},
    }
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1) + "\n"


def _result(objection: Objection, names: list[str]) -> dict[str, Any]:
    message = shorten(printable(objection.message), MAX_MESSAGE_CHARS, "report.json has it")
    found: dict[str, Any] = {
        "ruleId": objection.rule,
        "ruleIndex": names.index(objection.rule),
        "level": "error",
        "message": {"text": message},
        "partialFingerprints": {"bitproof/v1": objection.fingerprint},
    }
    # Without a file, the case is the only location.
    location: dict[str, Any] = {"logicalLocations": [{"name": objection.case, "kind": "case"}]}
    if objection.path is not None:
        place = {"artifactLocation": {"uri": quote(objection.path)}, "region": {"startLine": objection.line}}
        location["physicalLocation"] = place
    return found | {"locations": [location]}
