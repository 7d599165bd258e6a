"""`bitproof check-certificate`: checks certificates, without torch unless their graphs are traced again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bitproof.harness.case import Case
from bitproof.harness.certificate_checker import (
    FILES,
    MAIN,
    RejectedError,
    check,
    covers_any_number,
    hold,
    load,
    rejecting,
)
from bitproof.harness.errors import CaseError, MachineError, UsageError
from bitproof.harness.files.plain_files import SOURCE, check_plain
from bitproof.harness.graph.collector import gc_paused
from bitproof.harness.printable import printable
from bitproof.harness.processes.command import CommandError, Ran, run_command
from bitproof.harness.torch_versions import COVERED, is_covered

ACCEPTED, LESS, REJECTED = 0, 1, 3

SHOWN_CHANGES = 8

NAMESPACE, SECONDS = "bitproof-certificate", 30.0
"""The namespace of OpenSSH signatures of certificate.json, and the time limit of ssh-keygen in seconds.

That file has the digests of the others, so its signature covers the whole certificate.
"""


def check_certificates(
    folder: Path,
    *,
    retrace: bool = False,
    extra_passes: Sequence[str] = (),
    precompiled: Path | None = None,
    signers: Path | None = None,
) -> int:
    """Check the certificates in a folder or its subfolders, print what they state, and return the exit status.

    - 0: all certificates are accepted, and state that every output is equal.
    - 1: all certificates are accepted, but one does not state that every output is equal.
    - 3: a certificate is rejected.

    Options:

    - `signers`: a file of allowed signers. Each certificate must be signed by one of these.
    - `retrace`: trace both graphs again, which needs torch.
    - `extra_passes`, `precompiled`: options of the original proof, only with `retrace`.

    Raises UsageError for wrong options, and if the folder has no certificate.
    """
    if not retrace and (extra_passes or precompiled is not None):
        raise UsageError(
            "--extra-pass and --precompiled are about graphs that are traced again", expected="--retrace beside them"
        )
    # A folder with only some of the files counts, too: it is rejected later.
    parts = sorted({path.parent for name in FILES for path in folder.glob(f"*/{name}")})
    folders = [folder] if (folder / MAIN).is_file() else parts
    if not folders:
        raise UsageError("there is no certificate", expected=f"a folder with {MAIN}", found=str(folder))
    with gc_paused():  # with 61 layers, garbage collection would take half of the time
        # A higher status is a worse result: the worst certificate decides.
        return max(_check(folder, retrace, extra_passes, precompiled, signers) for folder in folders)


def _check(
    folder: Path, retrace: bool, extra_passes: Sequence[str], precompiled: Path | None, signers: Path | None
) -> int:
    try:
        # With `signers`, nothing of a certificate is parsed before its signature is verified.
        by = None if signers is None else _signer_of(folder / MAIN, signers)
        main, graphs, steps = load(folder)
        # The checker first: only then is the certificate's text known to have the expected form.
        counts = check(main, graphs, steps)
        case = _case_of(main["subject"])
        if retrace:
            from bitproof.harness.powers.proofs.prover.retrace import check_retraced

            check_retraced(main, graphs, case, extra_passes, precompiled)
    except RejectedError as error:
        _print_escaped(f"{folder}: REJECTED: {error}")
        return REJECTED
    verdicts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
    _print_escaped(f"{folder}: accepted: case {main['case']}, {len(steps)} steps; outputs: {verdicts}")
    digest = hashlib.sha256((folder / MAIN).read_bytes()).hexdigest()
    signed = [] if by is None else [f"signed by {by}, as {signers} knows whose key that is"]
    for line in (f"sha256 of {MAIN}: {digest}", *signed, *_about(main, graphs, case, retrace)):
        _print_escaped(f"  {line}")
    for text in main["assumptions"]:
        _print_escaped(f"  assumes that {text}")
    return ACCEPTED if counts["PROVED"] and set(counts) == {"PROVED"} else LESS


def _signer_of(main: Path, signers: Path) -> str:
    signature = main.with_name(f"{main.name}.sig")
    hold(signature.is_file(), f"it is not signed: there is no {signature.name}")
    for file in (signers, signature):
        try:
            check_plain(file, SOURCE)
        except OSError as error:
            raise RejectedError(f"{file} cannot be read: {error.strerror}") from error
    # find-principals only looks for the signature's key. `verify` below also checks the signed content and NAMESPACE.
    names = _keygen("find-principals", "-f", str(signers), "-s", str(signature))
    hold(names.status == 0 and bool(names.out.strip()), "not signed by any of the allowed signers")
    with rejecting():
        content = main.read_bytes().decode()  # the signature covers every byte
    why = ""
    for name in names.out.splitlines():
        by = ("-I", name, "-n", NAMESPACE, "-f", str(signers), "-s", str(signature))
        found = _keygen("verify", *by, given=content)
        if found.status == 0:
            return name
        why = (found.err or found.out).strip().partition("\n")[0]
    raise RejectedError(f"its signature is of something else, or for something else: {why}")


def _keygen(action: str, *words: str, given: str | None = None) -> Ran:
    try:
        return run_command(["ssh-keygen", "-Y", action, *words], SECONDS, given=given)
    except CommandError as error:
        raise MachineError(
            f"signatures are checked by ssh-keygen: {error}", fix="install OpenSSH 8.2 or later"
        ) from error


def _case_of(subject: Any) -> Case:
    try:
        case = Case.from_dict(json.loads(subject["case"]))
    except CaseError as error:
        raise RejectedError(f"it holds no case: {error.what}") from error
    torch = subject["torch"]
    hold(is_covered(torch), f"made with torch {torch}, and the checker knows operators of {COVERED} alone")
    return case


def _about(main: Any, graphs: Sequence[Any], case: Case, retraced: bool) -> list[str]:
    from bitproof.builtin_cases import CASES

    subject, model, ranks = main["subject"], case.model, case.parallelism.world_size
    lines = [f"is about {case.candidate} against {case.reference}, {model.family} {model.flavor}, {ranks} ranks"]
    covers = (
        "any number of steps from equal state" if covers_any_number(main, [*graphs]) else "one step, not what follows"
    )
    lines.append(f"covers {covers}")
    own = CASES.get(case.name)
    if own is None:
        lines.append(f"no case {case.name} comes with bitproof: what it is, certificate.json says")
    elif own != case:
        # Own values go through JSON, too: a tuple and a list would differ otherwise.
        changes = _changes(json.loads(subject["case"]), json.loads(json.dumps(own.to_dict())))
        more = f", and {len(changes) - SHOWN_CHANGES} more" if len(changes) > SHOWN_CHANGES else ""
        lines.append(f"not as case {case.name} comes with bitproof: {', '.join(changes[:SHOWN_CHANGES])}{more}")
    options = [f"--extra-pass {name}" for name in subject["extra_passes"]] + ["--precompiled"] * subject["precompiled"]
    if options:
        lines.append(f"the candidate was made with {' '.join(options)}")
    # Without names: operator, arguments and value of each call.
    one, other = ([call[1:4] for call in graph["calls"]] for graph in graphs)
    if one == other:
        lines.append("both graphs are the same, call for call")
    by = f"by code {subject['code'][:12]} with torch {subject['torch']} on {subject['machine']}"
    if retraced:
        return [*lines, f"both graphs were traced again {by}, and are those of the certificate"]
    return [
        *lines,
        f"NOT CHECKED: that these are the graphs of this case, and were made {by}; --retrace traces them again",
    ]


def _changes(stated: object, own: object, name: str = "") -> list[str]:
    if isinstance(stated, dict) and isinstance(own, dict):
        names = sorted({*stated, *own})
        return [x for key in names for x in _changes(stated.get(key), own.get(key), f"{name}.{key}".lstrip("."))]
    # With the certificate's value: "model.layers 4".
    return [] if stated == own else [f"{name} {json.dumps(stated)}"]


def _print_escaped(text: str) -> None:
    # A certificate's text is untrusted: its line breaks could fake a line of output.
    print(printable(text).replace("\n", "\\n"))
