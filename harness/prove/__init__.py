"""Static proofs, without running any rank, that two systems' steps compute equal bits for every input.

    systems' steps as graphs ─► export.py      every call with its layout, recomputed from fake values
                             ─► canonical.py   each call's result as a term
                             ─► rules.py       terms rewritten until equal values are the same term
                             ─► answers.py     outputs compared, differences traced back to modules
                             ─► evaluate.py    terms computed on random inputs, compared with both graphs

docs/explanation/proving.md explains the claim, its assumptions and its limits.
"""
