"""`bitproof doctor`: can cases run on this machine? With `--gpu`, checks that GPUs must pass first."""
