"""Stores recordings as baselines by environment, and compares later runs with them.

A baseline is in DIR/<case>/<system>/<environment id>/. The environment has every fact of a manifest that can affect a
bit, except the code, whose effect a baseline is meant to show. If bits differ from a baseline of the same environment,
the recording is DRIFTED. If all baselines are from other environments, it is NOT COMPARABLE. The result then names the
baseline with the fewest differing facts, and these facts. If only package versions differ, the result also names the
drifted tensors.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bitproof.harness.capture.recording_files import put_aside, put_in_place, read_manifest, read_recording, restate
from bitproof.harness.case import Case
from bitproof.harness.compare.recorded_environment import environment_of
from bitproof.harness.compare.same_case import leaf_differences
from bitproof.harness.compare.verdict import compare
from bitproof.harness.errors import BitproofError, RecordingError, UsageError, cut
from bitproof.harness.files.folder_names import file_name
from bitproof.harness.powers.baselines.records import BaselineResult, BaselineStatus
from bitproof.harness.records import (
    Accepted,
    Drift,
    Manifest,
    Recording,
    Verdict,
)

MeasureDrift = Callable[[Path, Path], list[Drift]]

# If only these facts differ, the bits are compared all the same, to show the drift that a new version brings.
_VERSION_FIELDS = {
    f"machine.{name}"
    for name in (
        *("python", "torch", "cuda", "libc", "numpy", "triton", "pyarrow", "xxhash"),
        *("nccl", "cudnn", "cublas", "driver"),
    )
}
_STATUS = {
    Verdict.EQUAL: BaselineStatus.EQUAL,
    Verdict.DIFFERENT: BaselineStatus.DRIFTED,
    Verdict.UNVERIFIED: BaselineStatus.UNVERIFIED,
}
_MAX_VALUE = 100
_MAX_DRIFT = 100


def environment_id(manifest: Manifest) -> str:
    """Return a folder name for a manifest's environment, such as `cpu-torch2.13.0-1a2b3c4d`."""
    environment = environment_of(manifest)
    # Sorted, so that equal environments have the same text and hash.
    content = json.dumps(environment, sort_keys=True).encode()
    # The name shows the version without its build, such as +cpu. The hash covers both.
    torch = str(environment["machine"].get("torch", "")).partition("+")[0]
    prefix = re.sub(r"[^\w.-]", "-", f"{environment['device']}-torch{torch}")[:40]
    return f"{prefix}-{hashlib.sha256(content).hexdigest()[:8]}"


def store_baseline(
    recording: Path,
    baseline_dir: Path,
    case: Case,
    system: str,
    *,
    force: bool = False,
    accepted: Accepted | None = None,
) -> Path:
    """Move a recording into the folder for its environment's baseline, and return that folder.

    With `accepted`, the baseline's manifest states why it was accepted. Raises UsageError if there already is a
    baseline, unless `force` replaces it.
    """
    found = read_recording(recording)
    environment = environment_of(found.manifest)
    # By contents: an earlier version may have named the folder of this environment differently.
    present = [
        folder
        for folder, manifest in _manifests(baseline_dir, case, system).items()
        if not isinstance(manifest, RecordingError) and environment_of(manifest) == environment
    ]
    folder = present[0] if present else _folders(baseline_dir, case, system)[0] / environment_id(found.manifest)
    # The present folder may be hidden, left from an interrupted replacement.
    folder = folder.with_name(put_aside(folder.name) or folder.name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    if accepted is not None:
        restate(recording, accepted=accepted)
    try:
        if present and not force:
            # Handled below, like a folder that another run has stored meanwhile.
            raise FileExistsError
        put_in_place(recording, folder, replaces=force)
    except FileExistsError as error:
        raise UsageError(
            "there is a baseline of this environment already",
            expected="none, or --force to replace it",
            found=f"{folder}, {_describe_bits(folder, found, case)}",
        ) from error
    except OSError as error:
        raise RecordingError(
            "the baseline cannot be stored",
            found=error.strerror or str(error),
            where=str(folder),
            fix="make room on its disk, or choose another folder with --baseline-dir",
        ) from error
    return folder


def values_to_keep(baseline_dir: Path, case: Case, system: str) -> tuple[str, ...]:
    """Return the name patterns of tensors whose values, and not only digests, are stored in a system's baselines.

    A new run must store the values of the same tensors: only then can its drift be measured in ULPs.
    """
    manifests = _manifests(baseline_dir, case, system).values()
    known = [manifest.values for manifest in manifests if not isinstance(manifest, RecordingError)]
    return tuple(dict.fromkeys(pattern for patterns in known for pattern in patterns))


def require_baseline(about: BaselineResult) -> BaselineResult:
    """Return `about`, with its status changed to MISSING if no baseline has the run's environment.

    This is for runs with `--require-baseline`.
    """
    if about.status not in (BaselineStatus.NO_BASELINE, BaselineStatus.NOT_COMPARABLE):
        return about
    why = "there is no baseline" if about.status == BaselineStatus.NO_BASELINE else "no baseline is of this environment"
    return replace(about, status=BaselineStatus.MISSING, reasons=[why, *about.reasons])


def unused_baselines(baseline_dir: Path, cases: Iterable[Case]) -> list[Path]:
    """Return the folders in `baseline_dir` with baselines of cases or systems that none of `cases` uses."""
    used = {
        folder
        for case in cases
        for system in (case.reference, case.candidate)
        for folder in _folders(baseline_dir, case, system)
    }
    found = (path for path in baseline_dir.glob("*/*") if path.is_dir() and not path.name.startswith("."))
    return sorted(path for path in found if path not in used and not path.parent.name.startswith("."))


def compare_with_baselines(
    recording: Path, baseline_dir: Path, case: Case, system: str, measure_drift: MeasureDrift
) -> BaselineResult:
    """Compare a recording with its system's baselines.

    A damaged file raises no error: the result is UNVERIFIED, with the error as its reason. `measure_drift` compares the
    values of two recordings.
    """
    try:
        manifests = _manifests(baseline_dir, case, system)
        if not manifests:
            return BaselineResult(status=BaselineStatus.NO_BASELINE)
        return _compare(recording, manifests, case, measure_drift)
    except RecordingError as error:
        return BaselineResult(status=BaselineStatus.UNVERIFIED, reasons=[str(error)])


def _compare(
    recording: Path,
    manifests: dict[Path, Manifest | RecordingError],
    case: Case,
    measure_drift: MeasureDrift,
) -> BaselineResult:
    here = read_recording(recording)
    environment = environment_of(here.manifest)
    differences = {
        folder: _differences(environment_of(manifest), environment)
        for folder, manifest in manifests.items()
        if not isinstance(manifest, RecordingError)
    }
    damaged = [manifest for manifest in manifests.values() if isinstance(manifest, RecordingError)]
    # A baseline of this very environment has no differences, so it is the nearest.
    nearest = min(differences, key=lambda folder: len(differences[folder]), default=None)
    # A damaged baseline may be the one of this environment, unless an intact one is.
    if nearest is None or (damaged and differences[nearest]):
        raise damaged[0]  # it may be of this environment
    reasons = [_describe_difference(path, *pair) for path, pair in differences[nearest].items()]
    if reasons and not differences[nearest].keys() <= _VERSION_FIELDS:
        return BaselineResult(status=BaselineStatus.NOT_COMPARABLE, path=str(nearest), reasons=reasons)
    there = read_recording(nearest)
    comparison = compare(there, here, case)
    # With other versions the status stays NOT COMPARABLE, even if all bits agree.
    status = BaselineStatus.NOT_COMPARABLE if reasons else _STATUS[comparison.verdict]
    if comparison.reason:
        reasons.append(name_baseline_sides(comparison.reason))
    drift: list[Drift] = []
    if comparison.verdict == Verdict.DIFFERENT:
        reasons += _other_code(there.manifest, here.manifest)
        # Drift that cannot be measured is reported all the same.
        try:
            drift = measure_drift(nearest, recording)
        except BitproofError as error:
            reasons.append(f"the drift cannot be measured:\n{error}")
    return BaselineResult(
        status=status,
        path=str(nearest),
        reasons=reasons,
        compared=sum(comparison.compared.values()),
        mismatched=sum(comparison.mismatched.values()),
        tensors_drifted=len(drift),
        drift=drift[:_MAX_DRIFT],
    )


def _other_code(baseline: Manifest, here: Manifest) -> list[str]:
    if baseline.graph is None or here.graph is None:
        return []
    names = ("code_hash", "generated_hash")
    pairs = {f"graph.{name}": (getattr(baseline.graph, name), getattr(here.graph, name)) for name in names}
    return [_describe_difference(path, *pair) for path, pair in pairs.items() if pair[0] != pair[1]]


def name_baseline_sides(reason: str) -> str:
    return reason.replace("the reference", "the baseline").replace("the candidate", "this run")


def _describe_difference(path: str, baseline: Any, here: Any) -> str:
    left, right = (cut(json.dumps(value), _MAX_VALUE) for value in (baseline, here))
    # Escaped as JSON, since the names come from files.
    return f"{json.dumps(path)[1:-1]}: {left} in the baseline, {right} here"


def _describe_bits(folder: Path, recording: Recording, case: Case) -> str:
    try:
        verdict = compare(read_recording(folder), recording, case).verdict
    except RecordingError:
        return "which is damaged"
    return "which has the same bits" if verdict == Verdict.EQUAL else "which has other bits"


def _differences(baseline: Mapping[str, Any], here: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return dict(leaf_differences({name: (baseline[name], here[name]) for name in here}))


def _folders(baseline_dir: Path, case: Case, system: str) -> tuple[Path, Path]:
    """Return a pair: the folder of a system's baselines, and the folder that earlier versions of bitproof used.

    Each has a subfolder for each environment. Earlier versions could use one folder for two systems, such as
    `sub/t.py:make` and `sub-t.py:make`. So in the second folder, the caller must check which system a manifest names.
    """
    earlier = re.sub(r"[^\w.-]", "-", system).lstrip(".") or "-"
    return baseline_dir / case.name / file_name(system), baseline_dir / case.name / earlier


def _manifests(baseline_dir: Path, case: Case, system: str) -> dict[Path, Manifest | RecordingError]:
    found: dict[Path, Manifest | RecordingError] = {}
    own, earlier = _folders(baseline_dir, case, system)
    # Both names are often the same folder.
    for folder in dict.fromkeys((own, earlier)):
        for child in _children(folder):
            try:
                manifest = read_manifest(child)
            except RecordingError as error:
                # A damaged manifest names no system, so its folder counts for every system that might have used it.
                found[child] = error
            else:
                if folder == own or manifest.system == system:
                    found[child] = manifest
    return found


def _children(folder: Path) -> list[Path]:
    try:
        children = sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:  # the name is from an earlier version, which stored no such folder
            return []
        raise RecordingError(
            "baselines cannot be read", found=error.strerror or str(error), where=str(folder)
        ) from error
    # An interrupted replacement leaves a hidden folder, which counts unless the visible folder exists, too.
    names = {child.name for child in children}
    return [
        child
        for child in children
        if not child.name.startswith(".") or (put_aside(child.name) or child.name) not in names
    ]
