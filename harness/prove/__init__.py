"""Static proofs, without running any rank, that two systems' steps compute equal bits for every input.

systems' steps as graphs ─► export.py      every call with its layout, recomputed from fake values
"""
