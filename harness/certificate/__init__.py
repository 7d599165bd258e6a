"""Certificates of equal bits: what `bitproof prove` writes down, and a checker that believes none of it.

    data.py          a graph, a term, a step of rewriting, an answer: as data, and as JSON
    assumptions.py   what a proof rests on, in words
    windows.py       which elements of a tensor a view shows, as arithmetic over its elements in row-major order
    calls.py         the term of each call of a graph, derived again
    types.py         the type of each kind of term, derived from those of its parts
    rules.py         each rule of rewriting, applied once
    check.py         the checker: every call's term, every step, every answer
    subject.py       what a certificate is about, held against its graphs
    files.py         certificates on disk
    errors.py        how a certificate is rejected

Nothing here imports torch, and the checker shares no code with the prover, which finds what is checked here.
"""
