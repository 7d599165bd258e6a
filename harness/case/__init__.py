"""A case, the value that everything starts from: its definition, its file, and how expressions select some."""

from harness.case.case import (
    DIM_MULTIPLE,
    KINDS,
    SIZES,
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
from harness.case.traced import GRAPH, JOINT, TRACED

__all__ = [
    "DIM_MULTIPLE",
    "GRAPH",
    "JOINT",
    "KINDS",
    "SIZES",
    "TRACED",
    "AdamW",
    "Batch",
    "Case",
    "Chunking",
    "ExpectedVerdict",
    "Kind",
    "Memory",
    "Model",
    "Parallelism",
    "Pipeline",
    "Precision",
    "pattern_of",
    "root_of",
]
