"""A case: two systems, a model, its layout on ranks, and the expected verdict. Every run starts from a case.

This package defines cases, reads and writes their files, and selects cases by expressions.
"""

from bitproof.harness.case.autoplace import Autoplace, Plan, with_plan
from bitproof.harness.case.bounds import SIZES
from bitproof.harness.case.case import KINDS, USUAL_KINDS, Case, ExpectedVerdict, Kind
from bitproof.harness.case.case_parts import DIM_MULTIPLE, AdamW, Batch, Chunking, Memory, Model, Parallelism, Precision
from bitproof.harness.case.observed import Boundary, boundary_of, observed_modules
from bitproof.harness.case.patterns import pattern_of, root_of
from bitproof.harness.case.schedule import Schedule, stage_of_layer
from bitproof.harness.case.stage_map import StageMap
from bitproof.harness.case.texts import ADVERSARIAL, PYDOC, PYDOC_LINES
from bitproof.harness.case.traced import (
    AUTOPLACE,
    COMPILED,
    GRAPH,
    JOINT,
    PRECOMPILED,
    PREPARED,
    TRACED,
    Pipeline,
    refuse_unwritten,
)

__all__ = [
    "ADVERSARIAL",
    "AUTOPLACE",
    "COMPILED",
    "DIM_MULTIPLE",
    "GRAPH",
    "JOINT",
    "KINDS",
    "PRECOMPILED",
    "PREPARED",
    "PYDOC",
    "PYDOC_LINES",
    "SIZES",
    "TRACED",
    "USUAL_KINDS",
    "AdamW",
    "Autoplace",
    "Batch",
    "Boundary",
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
    "Schedule",
    "StageMap",
    "boundary_of",
    "observed_modules",
    "pattern_of",
    "refuse_unwritten",
    "root_of",
    "stage_of_layer",
    "with_plan",
]
