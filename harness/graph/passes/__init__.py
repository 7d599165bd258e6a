"""The passes. Each has a module of its own, named as in the pass list of `harness.graph.pipeline`."""
