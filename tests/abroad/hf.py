"""Models of transformers under FSDP2, in a plain loop: `options` say which, the factory how it runs."""

import torch
import transformers
from torch.distributed.fsdp import fully_shard

import bitproof

SIZES = dict(
    vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, use_cache=False,
)  # fmt: skip


def model_of(case):
    name, sizes = case.options["model"], SIZES | case.options.get("sizes", {})
    return getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**sizes)).train()


def plain(case, mesh, change=lambda model: None):
    model = model_of(case)
    change(model)
    for module in (*model.model.layers, model):
        fully_shard(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(mesh.rank)

    def step(index):
        tokens = torch.randint(128, (4, 16), generator=data)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return bitproof.watch(step, model=model, optimizer=optimizer)


def checkpointed(case, mesh):
    return plain(case, mesh, lambda model: model.gradient_checkpointing_enable({"use_reentrant": False}))


def compiled(case, mesh):
    return plain(case, mesh, lambda model: [layer.compile(backend="aot_eager") for layer in model.model.layers])


def other_eps(case, mesh):
    return plain(case, mesh, lambda model: setattr(model.model.layers[1].input_layernorm, "variance_epsilon", 1e-4))
