"""Defines the certificate of an upgrade: two environments, the moved calls, and whether they explain the difference."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal

from bitproof.harness.errors import RecordingError
from bitproof.harness.files.plain_files import read_plain
from bitproof.harness.ulps import Count
from bitproof.harness.validate import STRICT, Whole, parse, read

MOVED, NONDETERMINISTIC, NOT_REPLAYED = "moved", "nondeterministic", "not replayed"
State = Literal["moved", "nondeterministic", "missing", "signature", "not replayed", "failed"]
Verdict = Literal["EQUAL", "DIFFERENT", "NONDETERMINISTIC", "not run"]


@dataclass(frozen=True, kw_only=True)
class MovedRow:
    """An operator call whose results are not equal in the new environment.

    Calls that differ only in values share a row.

    - `elements`, `total`: number of differing elements of the results, and number of all elements.
    - `smallest`: smallest tested input shape at which the call differs.
    - `switch`: a setting that restores the old bits.
    - `alone`: first record that changes if this call has its new results, and all other calls their old results.
    - `is_drawn`: the inputs were too large to store, so the call was replayed with random inputs of the same
      distribution.
    """

    __pydantic_config__ = STRICT

    operator: str
    dtypes: list[str]
    shapes: list[list[int]]
    state: State
    detail: str = ""
    elements: Count = 0
    total: Count = 0
    ulps: int | None = None
    where: str = ""
    first: list[tuple[int, str, str]] = field(default_factory=list)
    smallest: str = ""
    causes: list[str] = field(default_factory=list)
    switch: str = ""
    alone: str = ""
    is_drawn: bool = False
    only_in_the_program: bool = False


@dataclass(frozen=True, kw_only=True)
class Verified:
    """The program's run in the new environment, compared with its run in the old environment.

    - `plain`: verdict of an unchanged run.
    - `with_exchange`: verdict of a run in which all moved calls (those whose results changed) return their old results.
    - `first`: first difference of the unchanged run, in words.
    - `remainder`: first difference of the run with old results, in words.
    - `exchanged`: number of replaced results.
    """

    __pydantic_config__ = STRICT

    plain: Verdict = "not run"
    first: str = ""
    with_exchange: Verdict = "not run"
    records: Count = 0
    exchanged: Count = 0
    remainder: str = ""


@dataclass(frozen=True, kw_only=True)
class RecordingIdentity:
    """The identity of a recording's bits and environment. `environment` maps names of facts to JSON texts."""

    __pydantic_config__ = STRICT

    digest: str
    records: Count
    environment: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class MovedCertificate:
    """The result of comparing two environments.

    - `uncollected`: reason -> number of calls that were not compared for this reason.
    - `recordings`: [identity of the old recording of a case, identity of the new one]; [] for a script or function.
    """

    __pydantic_config__ = STRICT

    format: Literal["moved-1"] = "moved-1"
    program: str
    steps: Count
    old: dict[str, str | int]
    new: dict[str, str | int]
    variables: dict[str, str] = field(default_factory=dict)
    calls: Count
    operators: Count
    equal: Count
    rows: list[Annotated[MovedRow, Whole("a row", RecordingError)]]
    verified: Annotated[Verified, Whole("a verification", RecordingError)]
    uncollected: dict[str, Count] = field(default_factory=dict)
    system: str = ""
    recordings: list[Annotated[RecordingIdentity, Whole("a recording", RecordingError)]] = field(default_factory=list)

    @property
    def moved(self) -> list[MovedRow]:
        return [row for row in self.rows if row.state == MOVED]

    @property
    def explains_all(self) -> bool:
        """Whether the moved calls explain the whole difference: with their old results, the program is EQUAL."""
        return self.verified.plain == "DIFFERENT" and self.verified.with_exchange == "EQUAL"

    def problem(self) -> str | None:
        """Return how the certificate contradicts itself, in words; None if it does not."""
        found = self.verified
        # Every call is either equal or has a row.
        if self.equal + len(self.rows) != self.calls:
            return f"{self.equal} equal calls and {len(self.rows)} others, of {self.calls}"
        if self.operators > self.calls:
            return f"{self.operators} operators in {self.calls} calls"
        if found.with_exchange != "not run" and found.plain != "DIFFERENT":
            return f"an exchange was verified, although the program is {found.plain}"
        if found.with_exchange == "EQUAL" and not (self.moved and found.exchanged and found.records):
            return "an exchange without a moved call, an exchanged result or a record made all records equal"
        if bool(found.remainder) and found.with_exchange == "EQUAL":
            return f"a remainder, although all records are equal: {found.remainder}"
        if len(self.recordings) not in (0, 2):
            return f"{len(self.recordings)} recordings, expected the old and the new"
        if found.plain == "EQUAL" and len({each.digest for each in self.recordings}) > 1:
            return "recordings of other bits, although the program is EQUAL"
        if found.plain == "DIFFERENT" and len({each.digest for each in self.recordings}) == 1:
            return "recordings of the same bits, although the program is DIFFERENT"
        if any(row.elements > row.total for row in self.rows):
            return "more elements moved than a result has"
        return None


def write_certificate(path: Path, certificate: MovedCertificate) -> None:
    values = asdict(certificate)
    path.write_text(json.dumps(values | {"digest": digest_of(values)}, indent=1) + "\n")


def digest_of(values: dict[str, Any]) -> str:
    """Return the digest of a certificate's values. It reveals damage, but does not prove who wrote them."""
    return sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def read_certificate(path: Path) -> MovedCertificate:
    """Read a certificate. Raises RecordingError if the file is damaged or contradicts itself."""
    try:
        values: Any = parse(read_plain(path))
    except OSError as error:
        raise RecordingError("the certificate cannot be read", found=error.strerror, where=str(path)) from error
    except (ValueError, RecursionError) as error:
        raise RecordingError("the certificate is not JSON", found=str(error), where=str(path)) from error
    # The digest is over the file's own values, before any default is filled in.
    if not isinstance(values, dict) or values.pop("digest", None) != digest_of(values):
        raise RecordingError("the certificate is damaged", expected="a digest of its values", where=str(path))
    found = read(MovedCertificate, values, "certificate", RecordingError, where=str(path))
    if text := found.problem():
        raise RecordingError("the certificate contradicts itself", found=text, where=str(path))
    return found
