"""Static proofs, without running a rank, that two systems' steps give equal bits for every input.

    systems' steps as graphs ─► export.py      every call with its layout, from fake values computed again
                             ─► canonical.py   what each call computes, as a term
                             ─► rules.py       terms rewritten until equal values are one term
                             ─► answers.py     outputs compared, differences led back to modules
                             ─► evaluate.py    terms computed on random inputs, against both graphs

docs/explanation/proving.md explains what is proved, under which assumptions, and what is not.
"""
