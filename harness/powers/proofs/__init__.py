"""Proves, without running the steps, that two systems compute equal bits for every input.

The commands `prove` and `check-certificate` are in `cli`, the check `--prove-first` in `check`, and the prover in
`prover`.
"""
