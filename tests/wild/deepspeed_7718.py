"""ZeRO-2 with gradient accumulation loses micro-batches: https://github.com/deepspeedai/DeepSpeed/issues/7718"""

import inspect
import textwrap

from deepspeed.runtime.zero import stage_1_and_2
from zero import accumulated

LOST, KEPT = (
    "if not i in self.averaged_gradients or self.averaged_gradients",
    "if self.all_grad_tensors.get(i) is None or self.all_grad_tensors",
)


def reference(case, mesh):
    """Adds to what it has of a partition so far, as 0.18.3 does, and not to what a whole step left."""
    kind = stage_1_and_2.DeepSpeedZeroOptimizer
    source = textwrap.dedent(inspect.getsource(kind.independent_gradient_partition_epilogue))
    made = {}
    exec(source.replace(LOST, KEPT), vars(stage_1_and_2), made)
    kind.independent_gradient_partition_epilogue = made["independent_gradient_partition_epilogue"]
    return accumulated(mesh, stage=2)


def candidate(case, mesh):
    return accumulated(mesh, stage=2)
