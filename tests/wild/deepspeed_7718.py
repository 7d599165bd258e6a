"""ZeRO-2 with gradient accumulation loses micro-batches: https://github.com/deepspeedai/DeepSpeed/issues/7718"""

from zero import accumulated


def reference(case, mesh):
    return accumulated(mesh, stage=3)  # which sums over ranks in each micro-batch, too


def candidate(case, mesh):
    return accumulated(mesh, stage=2)
