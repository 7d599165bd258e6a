"""The graph pipeline: a traced training step and the passes that rewrite it.

Knows nothing of `reference`: whoever calls it hands over a model and a loss function.
"""
