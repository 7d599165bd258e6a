"""Models of transformers under FSDP2 or DDP, in a plain loop: `options` say which, the factory how it runs."""

import torch
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import bitproof

SIZES = dict(
    vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, use_cache=False,
)  # fmt: skip


def model_of(case):
    name, sizes = case.options["model"], SIZES | case.options.get("sizes", {})
    return getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**sizes)).train()


def sharded(model):
    for module in (*model.model.layers, model):
        fully_shard(module)
    return model


def plain(case, mesh, change=lambda model: None, lay_out=sharded):
    model = model_of(case)
    change(model)
    model = lay_out(model)
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

    def state():
        of_model, of_optimizer = get_state_dict(model, optimizer)
        return {"model": of_model, "optimizer": of_optimizer, f"data.{mesh.rank}": data.get_state()}

    def load(folder):
        found = state()
        dcp.load(found, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
        data.set_state(found[f"data.{mesh.rank}"])

    system = bitproof.watch(step, model=model, optimizer=optimizer)
    system.save, system.load = lambda folder: dcp.save(state(), checkpoint_id=folder), load
    return system


def replicated(case, mesh):
    return plain(case, mesh, lay_out=DistributedDataParallel)


def checkpointed(case, mesh):
    return plain(case, mesh, lambda model: model.gradient_checkpointing_enable({"use_reentrant": False}))


def compiled(case, mesh):
    return plain(case, mesh, lambda model: [layer.compile(backend="aot_eager") for layer in model.model.layers])


def other_eps(case, mesh):
    return plain(case, mesh, lambda model: setattr(model.model.layers[1].input_layernorm, "variance_epsilon", 1e-4))
