"""Deliberate defects, injected into the candidate to check that they are detected.

A fault is written like `flip-bit:rank=1,step=0,grad=norm.weight`, or as the name of an entry of the catalogue (see
`entry`). A fault that never applies is an error.
"""

from bitproof.harness.disturb.entry import Entry, Named, Site
from bitproof.harness.disturb.faults.injector import Injector, flip_bit
from bitproof.harness.disturb.faults.parse import check_fault, known_faults, parse_fault
from bitproof.harness.disturb.kinds import (
    FAULTS,
    SUM_ORDERS,
    Fault,
    FlipBit,
    HangRank,
    KillRank,
    Raise,
    RankFault,
    SumOrder,
)

__all__ = [
    "FAULTS",
    "SUM_ORDERS",
    "Entry",
    "Fault",
    "FlipBit",
    "HangRank",
    "Injector",
    "KillRank",
    "Named",
    "Raise",
    "RankFault",
    "Site",
    "SumOrder",
    "check_fault",
    "flip_bit",
    "known_faults",
    "parse_fault",
]
