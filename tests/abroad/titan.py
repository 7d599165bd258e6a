"""torchtitan's trainers by its own command line: `options` has what both sides have in common, then each side's own."""

from functools import partial

import titan_on_cpu  # noqa: F401  # first: torchtitan looks for a device when it is imported
from torchtitan.config import ConfigManager

import bitproof


def trainer(case, mesh, side):
    words = f"{case.options['titan']} {case.options[side]} --training.steps {case.steps} --debug.seed {case.seed}"
    it = ConfigManager().parse_args(words.split()).build()
    return bitproof.watch(train=it.train, model=it.model_parts, optimizer=it.optimizers, loss=it.forward_backward_step)


reference, candidate = partial(trainer, side="reference"), partial(trainer, side="candidate")
