"""Explain the difference of two recordings by means of a certificate.

For example, a certificate of `bitproof moved` states that some operator calls account for the whole difference between
two environments.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bitproof.harness.errors import RecordingError
from bitproof.harness.files.plain_files import read_plain
from bitproof.harness.records import Recording

FORMATS = {"moved-1": "bitproof.harness.powers.moved.explaining:explainer"}
"""Maps a certificate's field `format` to the function that reads the certificate, as MODULE:FUNCTION."""


@dataclass(frozen=True)
class Explanation:
    """Whether a certificate accounts for the whole difference of two recordings (`is_whole`), and a text that says so
    or why not."""

    is_whole: bool
    text: str

    @staticmethod
    def by(text: str) -> Explanation:
        return Explanation(True, f"drift explained by {text}")

    @staticmethod
    def lacking(reason: str) -> Explanation:
        return Explanation(False, f"drift unexplained: {reason}")


Explainer = Callable[[Recording, Recording], Explanation]
"""A function that explains the difference of two recordings by a certificate."""


def explainer_of(certificate: Path) -> Explainer:
    """Read a certificate, and return a function that explains the difference of two recordings by this certificate.

    Raises RecordingError if the file cannot be read, is damaged, or has an unknown format.
    """
    try:
        values = json.loads(read_plain(certificate))
        name = values["format"]
        module, _, function = FORMATS[name].partition(":")
    except OSError as error:
        raise RecordingError(
            "the certificate cannot be read", found=error.strerror or str(error), where=str(certificate)
        ) from error
    # TypeError: JSON that is no object, or a format that is no text. RecursionError: JSON nested too deeply.
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise RecordingError(
            "the certificate has no known format", expected=" or ".join(FORMATS), where=str(certificate)
        ) from error
    # Imported only for a certificate of this format.
    made: Explainer = getattr(importlib.import_module(module), function)(certificate)
    return made
