"""`bitproof doctor`: checks whether cases can run on this machine. `--gpu` also checks its GPUs."""
