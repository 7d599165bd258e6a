"""`bitproof precompile`: trace a case's step in a process without ranks, and store it for later runs.

In these runs all ranks load this step.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from bitproof.harness.case import PREPARED, Case
from bitproof.harness.errors import CaseError
from bitproof.harness.execute.precompiled import HOST_MARGIN
from bitproof.harness.execute.requests import PrecompileAnswer, PrecompileRequest
from bitproof.harness.execute.session import open_session
from bitproof.harness.execute.transport import refuse_torchrun
from bitproof.harness.options import RunOptions


def precompile(case: Case, out: Path, options: RunOptions, print_line: Callable[[str], None] = print) -> int:
    """Precompile the step of a case's candidate into the folder `out`, print a summary with `print_line`, and return 0.

    The step is traced twice, as the first and as the last rank. Both traces must have the same code. Raises:

    - CaseError: the candidate runs no graph, or a graph that cannot be stored.
    - UsageError: torchrun started the command, or a fault in `options` changes both traces alike.
    - ArtifactError: the two traces differ.

    After an error the folder has a note with the reason instead of the step.
    """
    refuse_torchrun("precompile", "makes a step for all ranks in one process")
    if case.candidate not in PREPARED:
        raise CaseError(
            f"the candidate of case {case.name} runs no graph to precompile",
            expected="the candidate graph, joint or precompiled",
            found=f"candidate {case.candidate}",
            fix="give --candidate graph",
        )
    made = make(case, out.resolve(), options)
    for line in _summary(case, out, made):
        print_line(line)
    return 0


def make(case: Case, out: Path, options: RunOptions) -> PrecompileAnswer:
    """Do the same as `precompile`, but print nothing, and return facts about the precompiled step."""
    with (
        tempfile.TemporaryDirectory(prefix="bitproof-precompile-") as logs,
        open_session(Path(logs), options) as client,
    ):
        # Without a stated device, the CPU: a trace needs no GPU, and this machine may have none.
        device = client.place(case).device if options.device != "auto" else "cpu"
        request = PrecompileRequest(
            case=case,
            system=case.candidate,
            out=out,
            device=device,
            inject=options.inject,
            timeout=options.timeout,
        )
        return client.ask(request, options.timeout + HOST_MARGIN)


def _summary(case: Case, out: Path, made: PrecompileAnswer) -> list[str]:
    artifact, (first, last) = made.artifact, made.trace_seconds
    compared = f"and {last:.1f} s as rank {artifact.ranks - 1}, to the same code" if artifact.ranks > 1 else ""
    trust = " --trust-compiled" if artifact.compiled else ""
    code = [f"  compiled code, sha256 {artifact.compiled}"] if artifact.compiled else []
    return [
        f"precompiled: {artifact.system} of {case.name} for {artifact.ranks} ranks, {artifact.nodes} nodes, "
        f"{artifact.groups} process groups to make",
        f"  traced in {first:.1f} s as rank 0 {compared}".rstrip() + f"; passes took {made.pass_seconds:.1f} s",
        f"  fingerprint {artifact.fingerprint}",
        *code,
        f"  {out}: {artifact.bytes / 2**20:.2f} MiB; run it: bitproof run -k {case.name} --precompiled {out}{trust}",
    ]
