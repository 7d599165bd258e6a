"""What runs leave behind: recordings, verdicts and the report, as plain values.

Everything here can be written as JSON and read back; nothing here imports torch.
"""

from harness.case.shard import (
    Shard,
)
from harness.records.artifact import Artifact
from harness.records.bisection import (
    TRACE,
    Bisection,
    Probe,
)
from harness.records.comparison import Comparison
from harness.records.faults import (
    FaultOutcome,
    FaultsFound,
    FaultStatus,
    Score,
)
from harness.records.partition import Partition
from harness.records.placed import Placed, PlacedTensor
from harness.records.proof import (
    ProofOutcome,
    ProofVerdict,
)
from harness.records.recording import (
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
from harness.records.report import Report
from harness.records.result import (
    MAX_DIFFERING,
    SCHEMA,
    BaselineResult,
    BaselineStatus,
    BlamedCall,
    CaseResult,
    CaseSeconds,
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
from harness.records.sensitivity import (
    FormulaRow,
    Sensitivity,
    SensitivityRow,
    UnseenCall,
    by_direction,
    wilson,
)
from harness.ulps import (
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
