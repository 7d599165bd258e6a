"""The router learns from experts that its rank does not have: https://github.com/huggingface/transformers/issues/48687"""

from experts import trained
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

forward = ALL_EXPERTS_FUNCTIONS["batched_mm"]


def right(experts, hidden_states, chosen, weights):
    """The same without a weight for experts of other ranks, which are numbered past the last one here."""
    return forward(experts, hidden_states, chosen, weights.masked_fill(chosen >= experts.num_experts, 0.0))


def reference(case, mesh):
    ALL_EXPERTS_FUNCTIONS["batched_mm"] = right
    return trained(mesh, "batched_mm")


def candidate(case, mesh):
    return trained(mesh, "batched_mm")
