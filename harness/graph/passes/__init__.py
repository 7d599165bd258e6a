"""The passes, each in its own module, with their names in the pass list of `harness.graph.pipeline`."""
