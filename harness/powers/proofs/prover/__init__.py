"""The prover: writes two steps' graphs as terms, and rewrites them until equal values are the same term.

systems' steps as graphs ─► graphs/export   every call with its layout, recomputed from fake values
                        ─► canonical        equal values become the same term, by the rewrites in `rules`
                        ─► answers          an answer for each output: PROVED, NOT PROVED or REFUSED
"""
