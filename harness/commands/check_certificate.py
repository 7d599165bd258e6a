"""One `bitproof check-certificate`: a certificate checked without torch, and the exit status."""

from __future__ import annotations

from pathlib import Path

from bitproof.harness.certificate.check import check
from bitproof.harness.certificate.files import FILES, MAIN, read_certificate
from bitproof.harness.certificate.rules import RejectedError
from bitproof.harness.errors import UsageError
from bitproof.harness.printable import printable

ACCEPTED, LESS, REJECTED = 0, 1, 3


def check_certificates(folder: Path) -> int:
    """Check the certificate in a folder, or each in the folders of it; tell what each says and what it assumes.

    Returns 0 where all are accepted and every output is proved, 1 where an output is not claimed, 3 where a
    certificate is rejected. Raises UsageError where there is none.
    """
    parts = sorted({path.parent for name in FILES for path in folder.glob(f"*/{name}")})  # a part alone is rejected
    folders = [folder] if (folder / MAIN).is_file() else parts
    if not folders:
        raise UsageError("there is no certificate", expected=f"a folder with {MAIN}", found=str(folder))
    return max(_check(folder) for folder in folders)


def _check(folder: Path) -> int:
    try:
        certificate = read_certificate(folder)
        counts = check(certificate)
    except RejectedError as error:
        _tell(f"{folder}: REJECTED: {error}")
        return REJECTED
    told = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
    _tell(f"{folder}: accepted: case {certificate.case}, {len(certificate.steps)} steps; outputs: {told}")
    for text in certificate.assumptions:
        _tell(f"  assumes that {text}")
    return ACCEPTED if counts["PROVED"] and set(counts) == {"PROVED"} else LESS


def _tell(text: str) -> None:
    """Print one line: words of a certificate make none of their own."""
    print(printable(text).replace("\n", "\\n"))
