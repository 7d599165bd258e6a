"""The graph pipeline: a traced training step and the passes that rewrite it.

It does not depend on `reference`: callers pass a model and a loss function.
"""
