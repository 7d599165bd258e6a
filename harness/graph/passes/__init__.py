"""The passes, one module each, with their names in the pass list of `harness.graph.pipeline`."""
