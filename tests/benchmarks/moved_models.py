"""Twenty small training steps for `bench_moved.py`: each function is a program of `bitproof moved`."""

import os

import torch
from torch import nn

F = nn.functional

BATCH = int(os.environ.get("MOVED_BATCH", "8"))
DTYPE = getattr(torch, os.environ.get("MOVED_DTYPE", "float32"))
DIM = int(os.environ.get("MOVED_DIM", "16"))


def train(model, inputs, loss=None, kind="sgd", dtype=DTYPE):
    """One step; returns the loss."""
    model = model.to(dtype)
    inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
    optimizers = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
        "adam": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=False),
        "rms": lambda p: torch.optim.RMSprop(p, lr=1e-3, foreach=False),
    }
    optimizer = optimizers[kind](model.parameters())
    output = model(inputs)
    value = output.float().square().mean() if loss is None else loss(output)
    value.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
    optimizer.step()
    return value


def rows():
    return torch.randn(BATCH, DIM)


def tokens(length=8):
    return torch.randint(0, 32, (BATCH // 4 or 1, length))


def images():
    return torch.randn(BATCH // 4 or 1, 3, 12, 12)


def labels(output):
    return F.cross_entropy(output.float().flatten(0, -2), torch.arange(output[..., 0].numel()) % output.shape[-1])


def mlp(activation, norm=nn.Identity):
    return nn.Sequential(nn.Linear(DIM, 2 * DIM), activation(), norm(), nn.Linear(2 * DIM, DIM))


class Attention(nn.Module):
    """Softmax written out, or torch's kernel."""

    def __init__(self, heads=2, fused=False, causal=True):
        super().__init__()
        self.heads, self.fused, self.causal = heads, fused, causal
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        else:
            scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
            if self.causal:
                scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
            y = scores.softmax(-1) @ v
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A transformer's block."""

    def __init__(self, norm=nn.LayerNorm, activation=nn.GELU, **attention):
        super().__init__()
        self.first, self.second, self.attention = norm(DIM), norm(DIM), Attention(**attention)
        self.mlp = mlp(activation)

    def forward(self, x):
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


class Call(nn.Module):
    """A module of a function of its parts."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function, self.parts = function, nn.ModuleDict(parts)

    def forward(self, x):
        return self.function(x, **self.parts)


def language(*blocks, norm=nn.LayerNorm):
    return nn.Sequential(nn.Embedding(32, DIM), *blocks, norm(DIM), nn.Linear(DIM, 32))


def mlp_relu():
    return train(mlp(nn.ReLU), rows())


def mlp_gelu():
    return train(mlp(nn.GELU), rows(), labels, "adam")


def mlp_silu():
    return train(mlp(nn.SiLU), rows(), kind="rms")


def mlp_tanh():
    return train(mlp(nn.Tanh), rows(), labels)


def mlp_sigmoid():
    return train(mlp(nn.Sigmoid), rows(), kind="adam")


def mlp_norm():
    return train(mlp(nn.ReLU, lambda: nn.LayerNorm(2 * DIM)), rows(), labels, "rms")


def gpt():
    return train(language(Block(), Block()), tokens(), labels, "adam")


def gpt_fused():
    return train(language(Block(fused=True)), tokens(), labels, "adam")


def llama():
    return train(language(Block(nn.RMSNorm, nn.SiLU, fused=True), norm=nn.RMSNorm), tokens(), labels, "adam")


def bert():
    return train(language(Block(causal=False)), tokens(), labels, "adam")


def conv():
    layers = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(200, 10)
    return train(nn.Sequential(*layers), images(), labels)


def conv_norm():
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
    return train(nn.Sequential(*layers, nn.Linear(32, 10), nn.Softmax(-1)), images(), kind="adam")


def residual():
    def run(x, enter, a, b, leave):
        x = enter(x)
        return leave((x + b(F.relu(a(x)))).mean((2, 3)))

    parts = {"enter": nn.Conv2d(3, 8, 3), "a": nn.Conv2d(8, 8, 3, padding=1), "b": nn.Conv2d(8, 8, 3, padding=1)}
    return train(Call(run, **parts, leave=nn.Linear(8, 10)), images(), labels)


def mixture():
    def run(x, gate, one, other):
        weights = gate(x).softmax(-1)
        return weights[:, :1] * one(x) + weights[:, 1:] * other(x)

    return train(Call(run, gate=nn.Linear(DIM, 2), one=mlp(nn.SiLU), other=mlp(nn.SiLU)), rows(), labels, "adam")


def autoencoder():
    def run(x, down, up):
        mean = down(x)
        noise = torch.linspace(-1, 1, mean.numel(), dtype=mean.dtype).view_as(mean)
        return up(mean + (0.5 * mean).exp() * noise) - x

    return train(Call(run, down=nn.Linear(DIM, 4), up=nn.Linear(4, DIM)), rows(), kind="adam")


def contrastive():
    def run(x, one, other):
        a, b = F.normalize(one(x), dim=-1), F.normalize(other(x), dim=-1)
        return a @ b.T / 0.07

    return train(Call(run, one=nn.Linear(DIM, DIM), other=nn.Linear(DIM, DIM)), rows(), labels)


def linear_attention():
    def run(x, embed, qkv, out):
        q, k, v = qkv(embed(x)).chunk(3, -1)
        state = (F.elu(k) + 1) * v
        return out((F.elu(q) + 1) * state.cumsum(1))

    parts = {"embed": nn.Embedding(32, DIM), "qkv": nn.Linear(DIM, 3 * DIM), "out": nn.Linear(DIM, 32)}
    return train(Call(run, **parts), tokens(), labels)


def graph_net():
    def run(x, a, b):
        near = torch.softmax(x @ x.T, -1)
        return b(near @ torch.tanh(a(near @ x)))

    return train(Call(run, a=nn.Linear(DIM, DIM), b=nn.Linear(DIM, 8)), rows(), labels, "rms")


def mixer():
    def run(x, embed, over, channels, out):
        x = embed(x)
        x = x + over(x.transpose(1, 2)).transpose(1, 2)
        return out((x + channels(x)).mean(1))

    parts = {"embed": nn.Embedding(32, DIM), "over": nn.Linear(8, 8), "channels": mlp(nn.GELU)}
    return train(Call(run, **parts, out=nn.Linear(DIM, 8)), tokens(), labels, "adam")


def tiny_values():
    """Subnormal numbers."""

    def run(x, a):
        small = a(x) * 1e-39
        return torch.cat(
            [(small + small / 2) * 1e20, (small - small * 0.25) * 1e20, small.sum(1, keepdim=True) * 1e20], 1
        )

    return train(Call(run, a=nn.Linear(DIM, DIM)), rows(), lambda y: (y * 1e18).float().square().mean())


MODELS = (
    *(mlp_relu, mlp_gelu, mlp_silu, mlp_tanh, mlp_sigmoid, mlp_norm, gpt, gpt_fused, llama, bert, conv, conv_norm),
    *(residual, mixture, autoencoder, contrastive, linear_attention, graph_net, mixer, tiny_values),
)
