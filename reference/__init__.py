"""The oracle: models, data, loss and a training step in plain PyTorch. Graph pipelines are compared with them.

Nothing here depends on graphs or passes. Read `models`, then `layers`, then `init`, `data` and `loss`.
"""
