"""Small models whose graphs are cut into stages."""

from __future__ import annotations

import torch

from bitproof.harness.graph.staged.cut_graph import cut
from bitproof.harness.graph.staged.cuts import Cuts
from tests.harness.graph.graphs import Applied, D, parameter, trace


def scaled(module, x):
    module.seen.add_(x.shape[0])
    return x + torch.tanh(x * module.weight) @ module.matrix


def layer():
    return Applied(scaled, weight=parameter(D), matrix=parameter(D, D), seen=torch.zeros(1))


def parts_of(model, num_stages, num_layers=None):
    joint = trace(model)
    cuts = Cuts(num_stages, num_layers or len(model.layers))
    return joint, cut(joint.module, cuts, joint.chunk_symbol)
