"""A small mixture of experts of transformers, divided among the ranks as `from_pretrained` divides it."""

import tempfile
from pathlib import Path

import torch
from torch import distributed
from transformers import OlmoeConfig, OlmoeForCausalLM
from transformers.distributed import DistributedConfig

import bitproof


def trained(mesh, implementation, change=lambda model: None):
    config = OlmoeConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_experts=8,
        num_experts_per_tok=2,
        use_cache=False,
    )
    where = [tempfile.mkdtemp()]
    distributed.broadcast_object_list(where)
    if mesh.rank == 0:
        OlmoeForCausalLM(config).save_pretrained(where[0], save_original_format=True)
    distributed.barrier()
    ranks = distributed.get_world_size()
    model = OlmoeForCausalLM.from_pretrained(
        Path(where[0]),
        distributed_config=DistributedConfig(tp_size=ranks, enable_expert_parallel=True),
        experts_implementation=implementation,
        dtype=torch.float32,
    ).train()
    change(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(0)  # all ranks have one batch

    def step(index):
        text = torch.randint(128, (2, 16), generator=data)
        loss = model(input_ids=text, labels=text).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return bitproof.watch(step, model=model, optimizer=optimizer)
