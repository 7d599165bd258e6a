"""`bitproof doctor`: what this machine can run; with `--gpu`, checks that GPUs must pass before a case runs on them."""
