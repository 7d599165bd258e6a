"""The prover: proves that two systems' steps compute equal bits.

A term describes a value in a graph, such as `neg(x)`. Terms are rewritten until equal values have the same term.

    systems' steps as graphs ─► graphs/export   every call with its layout, recomputed from fake values
                            ─► canonical        equal values become the same term, by the rewrites in `rules`
                            ─► answers          an answer for each output: PROVED, NOT PROVED or REFUSED
"""
