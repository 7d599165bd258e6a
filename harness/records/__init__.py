"""What runs leave behind: recordings, verdicts and the report, as plain values.

Everything here can be written as JSON and read back; nothing here imports torch.
"""

from bitproof.harness.case.shard import (
    Shard,
)
from bitproof.harness.records.artifact import Artifact
from bitproof.harness.records.bisection import (
    TRACE,
    Bisection,
    Probe,
)
from bitproof.harness.records.comparison import Comparison
from bitproof.harness.records.faults import (
    FaultOutcome,
    FaultsFound,
    FaultStatus,
    Score,
)
from bitproof.harness.records.partition import Partition
from bitproof.harness.records.placed import Placed, PlacedTensor
from bitproof.harness.records.proof import (
    ProofOutcome,
    ProofVerdict,
)
from bitproof.harness.records.recording import (
    REQUIRED_KINDS,
    ROLES,
    GraphIdentity,
    Key,
    MachineFacts,
    Manifest,
    PassSettings,
    Record,
    Recording,
    Role,
    Switch,
    TorchCompile,
    required_kinds,
)
from bitproof.harness.records.report import Report
from bitproof.harness.records.result import (
    MAX_DIFFERING,
    SCHEMA,
    BaselineResult,
    BaselineStatus,
    BlamedCall,
    CaseResult,
    CaseSeconds,
    ChainLink,
    Closeness,
    Differing,
    Divergence,
    Drift,
    Event,
    KindName,
    Neighbour,
    Pair,
    PassReport,
    Sample,
    Step,
    TensorDifference,
    Verdict,
    group_keys,
    zero_counts,
)
from bitproof.harness.records.sensitivity import (
    FormulaRow,
    Sensitivity,
    SensitivityRow,
    UnseenCall,
    by_direction,
    wilson,
)
from bitproof.harness.ulps import (
    BUCKETS,
    UNLIKE,
    Count,
    Histogram,
    ulp_bucket,
)

__all__ = [
    "BUCKETS",
    "MAX_DIFFERING",
    "REQUIRED_KINDS",
    "ROLES",
    "SCHEMA",
    "TRACE",
    "UNLIKE",
    "Artifact",
    "BaselineResult",
    "BaselineStatus",
    "Bisection",
    "BlamedCall",
    "CaseResult",
    "CaseSeconds",
    "ChainLink",
    "Closeness",
    "Comparison",
    "Count",
    "Differing",
    "Divergence",
    "Drift",
    "Event",
    "FaultOutcome",
    "FaultStatus",
    "FaultsFound",
    "FormulaRow",
    "GraphIdentity",
    "Histogram",
    "Key",
    "KindName",
    "MachineFacts",
    "Manifest",
    "Neighbour",
    "Pair",
    "Partition",
    "PassReport",
    "PassSettings",
    "Placed",
    "PlacedTensor",
    "Probe",
    "ProofOutcome",
    "ProofVerdict",
    "Record",
    "Recording",
    "Report",
    "Role",
    "Sample",
    "Score",
    "Sensitivity",
    "SensitivityRow",
    "Shard",
    "Step",
    "Switch",
    "TensorDifference",
    "TorchCompile",
    "UnseenCall",
    "Verdict",
    "by_direction",
    "group_keys",
    "required_kinds",
    "ulp_bucket",
    "wilson",
    "zero_counts",
]
