"""The passes, one module each, named as the column in `harness.graph.pipeline` names them."""
