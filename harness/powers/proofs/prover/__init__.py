"""Proves that the training steps of two systems compute equal bits.

A term describes how a value is computed, such as `neg(x)`. Terms are rewritten by rules that keep every bit. Two values
are equal if both are rewritten to the same term.

    two steps as graphs ─► graphs/export   calls as data, each with the layout of its result
                       ─► canonical       calls become terms, which `rules` rewrite
                       ─► answers         each output is PROVED, NOT PROVED or REFUSED
"""
