"""A static proof: the bits of two systems' steps are equal for every input, found without running a rank.

    systems' steps as graphs ─► export.py      every call with its layout, from fake values computed again
                             ─► canonical.py   what each call computes, as a term
                             ─► rules.py       terms rewritten until equal values are one term
                             ─► answers.py     outputs compared, differences led back to modules
                             ─► evaluate.py    terms computed on random inputs, against both graphs

docs/explanation/proving.md says what is proved, under which assumptions, and what is not.
"""
