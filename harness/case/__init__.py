"""A case, the value that everything starts from: its definition, its file, and how expressions select some."""

from harness.case.autoplace import Autoplace, Plan
from harness.case.case import (
    DIM_MULTIPLE,
    KINDS,
    SIZES,
    USUAL_KINDS,
    AdamW,
    Batch,
    Case,
    Chunking,
    ExpectedVerdict,
    Kind,
    Memory,
    Model,
    Parallelism,
    Pipeline,
    Precision,
    pattern_of,
    root_of,
)
from harness.case.traced import AUTOPLACE, GRAPH, JOINT, TRACED

__all__ = [
    "AUTOPLACE",
    "DIM_MULTIPLE",
    "GRAPH",
    "JOINT",
    "KINDS",
    "SIZES",
    "TRACED",
    "USUAL_KINDS",
    "AdamW",
    "Autoplace",
    "Batch",
    "Case",
    "Chunking",
    "ExpectedVerdict",
    "Kind",
    "Memory",
    "Model",
    "Parallelism",
    "Pipeline",
    "Plan",
    "Precision",
    "pattern_of",
    "root_of",
]
