"""bitproof's public Python API, for tests, notebooks and other tools.

    cases, Case and its parts       the available comparisons, and the settings of a comparison
    run, record, diff               run a case, record a system, compare two recordings
    localize, bisect, shrink, prove, sensitivity
                                    find a cause, a pass, a smaller case, a proof; measure a comparison's sensitivity
    Run, Comparison, Verdict        the results of a run
    watch                           make a system from a function that trains once
    prove(f, g, *inputs), keeps_bits
                                    prove that two functions, modules or graphs are equal, or that a pass keeps bits
    Check, Evidence, Finding, Sentence, Table, Code, setting
                                    for your own checks, which `--check FILE.py:CLASS` loads
    assert_bitwise_equal            assert that two tensors, or structures of them, agree in every bit
    BitproofError and its kinds     all errors that a call can raise
    Mesh, compiler_problem          for systems: a factory's argument, and why this machine cannot compile

Everything below `bitproof.harness`, `bitproof.reference` and `bitproof.cases` may change without notice. Importing this
module loads neither torch nor those three: each name is loaded when it is first used. `Mesh` needs torch: use it in
annotations only.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as typing says; the command must handle interrupts before anything takes time

if TYPE_CHECKING:
    from typing import Any

    from bitproof.bitwise import assert_bitwise_equal
    from bitproof.harness.case import (
        AdamW,
        Batch,
        Case,
        Chunking,
        Memory,
        Model,
        Parallelism,
        Pipeline,
        Precision,
        Schedule,
    )
    from bitproof.harness.checks.check import Check, Evidence
    from bitproof.harness.errors import (
        ArtifactError,
        BitproofError,
        CaseError,
        ChunkError,
        MachineError,
        PassError,
        PlacementError,
        RankError,
        RecordingError,
        TraceError,
        UsageError,
    )
    from bitproof.harness.machine.compiler import compiler_problem
    from bitproof.harness.powers.proofs.prover.pairs import PairProof
    from bitproof.harness.powers.proofs.prover.programs.keeps_bits import keeps_bits
    from bitproof.harness.powers.proofs.prover.programs.subjects import prove_equal
    from bitproof.harness.powers.proofs.records import ProofOutcome, ProofVerdict
    from bitproof.harness.powers.sensitivity.records import Sensitivity
    from bitproof.harness.powers.shrink.records import Bisection, Shrunk
    from bitproof.harness.records import (
        CaseResult,
        Code,
        Comparison,
        Divergence,
        Finding,
        Sentence,
        Table,
        Verdict,
    )
    from bitproof.harness.settings import setting
    from bitproof.harness.systems.watched_step import watch
    from bitproof.reference.parallel.mesh import Mesh
    from bitproof.runs import Run, assert_as_expected, cases, diff, record, run
    from bitproof.searches import bisect, localize, prove, sensitivity, shrink

_CASE = ("AdamW", "Batch", "Case", "Chunking", "Memory", "Model", "Parallelism", "Pipeline", "Precision", "Schedule")
_ERRORS = (
    "ArtifactError",
    "BitproofError",
    "CaseError",
    "ChunkError",
    "MachineError",
    "PassError",
    "PlacementError",
    "RankError",
    "RecordingError",
    "TraceError",
    "UsageError",
)
_RUNS = ("Run", "assert_as_expected", "cases", "diff", "record", "run")
_SEARCHES = ("bisect", "localize", "prove", "sensitivity", "shrink")
_RECORDS = (
    "CaseResult",
    "Divergence",
    "Code",
    "Finding",
    "Sentence",
    "Table",
    "Verdict",
)
_HOME = {
    "assert_bitwise_equal": "bitproof.bitwise",
    **dict.fromkeys(_RUNS, "bitproof.runs"),
    **dict.fromkeys(_CASE, "bitproof.harness.case"),
    **dict.fromkeys(_ERRORS, "bitproof.harness.errors"),
    **dict.fromkeys(_SEARCHES, "bitproof.searches"),
    **dict.fromkeys(_RECORDS, "bitproof.harness.records"),
    "Check": "bitproof.harness.checks.check",
    "Evidence": "bitproof.harness.checks.check",
    "Comparison": "bitproof.harness.compare.verdict",
    "ProofOutcome": "bitproof.harness.powers.proofs.records",
    "ProofVerdict": "bitproof.harness.powers.proofs.records",
    **dict.fromkeys(("Bisection", "Shrunk"), "bitproof.harness.powers.shrink.records"),
    "Sensitivity": "bitproof.harness.powers.sensitivity.records",
    "setting": "bitproof.harness.settings",
    "Mesh": "bitproof.reference.parallel.mesh",
    "keeps_bits": "bitproof.harness.powers.proofs.prover.programs.keeps_bits",
    "PairProof": "bitproof.harness.powers.proofs.prover.pairs",
    "prove_equal": "bitproof.harness.powers.proofs.prover.programs.subjects",
    "watch": "bitproof.harness.systems.watched_step",
    "compiler_problem": "bitproof.harness.machine.compiler",
    "__version__": "bitproof.harness",
}

__all__ = [
    "AdamW",
    "ArtifactError",
    "Batch",
    "Bisection",
    "BitproofError",
    "Case",
    "CaseError",
    "CaseResult",
    "Check",
    "ChunkError",
    "Chunking",
    "Code",
    "Comparison",
    "Divergence",
    "Evidence",
    "Finding",
    "MachineError",
    "Memory",
    "Mesh",
    "Model",
    "PairProof",
    "Parallelism",
    "PassError",
    "Pipeline",
    "PlacementError",
    "Precision",
    "ProofOutcome",
    "ProofVerdict",
    "RankError",
    "RecordingError",
    "Run",
    "Schedule",
    "Sensitivity",
    "Sentence",
    "Shrunk",
    "Table",
    "TraceError",
    "UsageError",
    "Verdict",
    "assert_as_expected",
    "assert_bitwise_equal",
    "bisect",
    "cases",
    "compiler_problem",
    "diff",
    "keeps_bits",
    "localize",
    "prove",
    "prove_equal",
    "record",
    "run",
    "sensitivity",
    "setting",
    "shrink",
    "watch",
]


def __getattr__(name: str) -> Any:
    """Import a public name from its module when it is first used."""
    if name not in _HOME:
        raise AttributeError(f"module 'bitproof' has no attribute {name!r}")
    # Imported here: only a first use needs it, and `import bitproof` stays fast.
    import importlib

    value = getattr(importlib.import_module(_HOME[name]), name)
    # From now on Python finds the name itself, without this function.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
