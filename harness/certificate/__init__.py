"""Certificates of equal bits: the output of `bitproof prove`, and a checker that trusts none of it.

    data.py          a graph, a term, a step of rewriting, an answer: as data, and as JSON
    assumptions.py   a proof's assumptions, in words
    windows.py       the elements of a tensor that a view selects, as arithmetic over row-major indices
    calls.py         the term of each call of a graph, derived again
    types.py         the type of each kind of term, derived from those of its parts
    rules.py         each rule of rewriting, applied once
    check.py         the checker: every call's term, every step, every answer
    subject.py       a certificate's subject, compared with its graphs
    files.py         certificates on disk
    errors.py        how a certificate is rejected

Nothing here imports torch, and the checker shares no code with the prover.
"""
