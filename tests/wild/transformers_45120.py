"""Mixtral's router hands probabilities to a loss that takes them for logits: https://github.com/huggingface/transformers/issues/45120"""

import types

import torch
from torch.nn.functional import linear
from torch.nn.parallel import DistributedDataParallel
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

import bitproof


def right(self, hidden_states):
    """The router as the mended release has it: what it returns first are logits."""
    hidden_states = hidden_states.reshape(-1, self.hidden_dim)
    logits = linear(hidden_states, self.weight)
    weights, chosen = torch.topk(torch.nn.functional.softmax(logits.float(), dim=-1), self.top_k, dim=-1)
    weights /= weights.sum(dim=-1, keepdim=True)
    return logits, weights, chosen


def trained(mesh, mend):
    config = MixtralConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
        router_aux_loss_coef=0.1,
        use_cache=False,
    )
    bare = MixtralForCausalLM(config)
    if mend:
        for module in bare.modules():
            if isinstance(module, MixtralTopKRouter):
                module.forward = types.MethodType(right, module)
    model = DistributedDataParallel(bare, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(mesh.rank)

    def step(index):
        text = torch.randint(128, (2, 16), generator=data)
        loss = model(input_ids=text, labels=text).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return bitproof.watch(step, model=model, optimizer=optimizer)


def reference(case, mesh):
    return trained(mesh, mend=True)


def candidate(case, mesh):
    return trained(mesh, mend=False)
