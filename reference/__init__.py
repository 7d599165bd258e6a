"""The oracle: plain PyTorch models, data, loss and training step, with which graph pipelines are compared.

Nothing here depends on graphs or passes. Read `models`, then `layers`, then `init`, `data` and `loss`.
"""
