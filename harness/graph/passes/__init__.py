"""The passes, one module each, named as the pass list in `harness.graph.pipeline` names them."""
