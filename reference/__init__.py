"""The oracle: plain PyTorch models, data, loss and training step that graph pipelines are judged against.

Nothing here knows of graphs or passes. Read `models`, then `layers`, then `init`, `data` and `loss`.
"""
