"""Training steps of small models of transformers, for the table of `bench_moved.py`; transformers must be installed."""

import os

import torch
import transformers

DTYPE = getattr(torch, os.environ.get("MOVED_DTYPE", "float32"))
SIZES = {"vocab_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 128}
SIZES |= {"intermediate_size": 256, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 64}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def language(name, head="ForCausalLM", **sizes):
    """A step of a language model."""
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **sizes})
    model = getattr(transformers, f"{name}{head}")(config)
    tokens = torch.randint(3, 128, (4, 32))
    return step(model, input_ids=tokens, labels=tokens)


def step(model, **inputs):
    """Loss, gradients, AdamW."""
    model.to(DTYPE).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    loss = model(**inputs).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
    optimizer.step()
    return loss


def gpt2():
    return language("GPT2", "LMHeadModel", n_embd=128, n_layer=2, n_head=4, n_positions=64)


def llama3():
    return language("Llama")


def qwen3():
    return language("Qwen3")


def mistral():
    return language("Mistral")


def gemma():
    return language("Gemma")


def phi():
    return language("Phi")


def mixtral():
    return language("Mixtral", num_local_experts=4)


def bert_masked():
    return language("Bert", "ForMaskedLM")


def t5():
    return language(
        "T5",
        "ForConditionalGeneration",
        d_model=128,
        d_kv=32,
        d_ff=256,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    )


def vit():
    config = transformers.ViTConfig(**{**SIZES, "image_size": 32, "patch_size": 8, "num_labels": 10})
    images = torch.randn(4, 3, 32, 32).to(DTYPE)
    return step(transformers.ViTForImageClassification(config), pixel_values=images, labels=torch.arange(4))


MODELS = (gpt2, llama3, qwen3, mistral, gemma, phi, mixtral, bert_masked, t5, vit)
