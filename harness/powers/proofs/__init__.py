"""Static proofs that two systems' steps compute equal bits for every input.

Commands: `prove` and `check-certificate` (`cli`). Check: `--prove-first` (`check`). The prover is in `prover`.
"""
