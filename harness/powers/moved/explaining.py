"""Explains the differences between two recordings by a certificate, for the commands `diff` and `accept`."""

from __future__ import annotations

from pathlib import Path

from bitproof.harness.checks.explanation import Explainer, Explanation
from bitproof.harness.powers.moved.recording_identity import differences, identity_of
from bitproof.harness.powers.moved.records import MovedCertificate, read_certificate
from bitproof.harness.printable import one_line
from bitproof.harness.records import Recording

MOST_REASONS = 3


def explainer(path: Path) -> Explainer:
    """Return a function that explains the differences between two recordings by the certificate in the file `path`.

    The function takes the recordings in either order. Raises RecordingError if the certificate is damaged.
    """
    certificate = read_certificate(path)

    def explain(first: Recording, second: Recording) -> Explanation:
        if len(certificate.recordings) != 2:
            text = f"the certificate is of {one_line(certificate.program)}, which has no recordings"
            return Explanation.lacking(f"{text}; make it of the case: bitproof moved CASE --python PATH")
        if reasons := _other_recordings(certificate, first, second):
            return Explanation.lacking("the certificate is of other recordings: " + "; ".join(reasons))
        if not certificate.explains_all:
            remainder = certificate.verified.remainder or f"the program is {certificate.verified.plain}"
            return Explanation.lacking(f"the moved calls do not account for it: {one_line(remainder)}")
        operators = ", ".join(dict.fromkeys(row.operator for row in certificate.moved))
        calls = f"{len(certificate.moved)} moved call{'s' if len(certificate.moved) > 1 else ''}"
        return Explanation.by(f"{calls} of {one_line(certificate.system)}: {one_line(operators)}")

    return explain


def _other_recordings(certificate: MovedCertificate, first: Recording, second: Recording) -> list[str]:
    old, new = certificate.recordings
    one, other = identity_of(first), identity_of(second)
    # `diff` takes recordings in any order, so both are tried, and the order with fewer differences counts.
    found = [[*differences(old, left), *differences(new, right)] for left, right in ((one, other), (other, one))]
    reasons = min(found, key=len)
    more = [f"and {len(reasons) - MOST_REASONS} more"] if len(reasons) > MOST_REASONS else []
    return [*map(one_line, reasons[:MOST_REASONS]), *more]
