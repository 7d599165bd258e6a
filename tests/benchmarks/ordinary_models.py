"""Small models as people write them, with their losses and inputs, for `prove_models.py`.

Those of transformers come from random configurations. The others are written here in the style of torchvision, timm and
tutorials. Dropout is off, unless a name says otherwise.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

Made = tuple[nn.Module, Callable[..., Tensor], tuple[Tensor, ...]]
"""A model, its loss as a function of it and of the inputs, and the inputs."""

VOCABULARY, WIDTH, LENGTH, BATCH = 32, 16, 8, 2


def tokens() -> Tensor:
    """A batch of sequences, one token longer than what a model reads."""
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1))


def next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """The loss of nearly every script that trains a language model."""
    found: Any = model(tokens[:, :-1])
    logits = getattr(found, "logits", found)
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]).float(), tokens[:, 1:].reshape(-1))


def class_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The loss of a classifier."""
    found: Any = model(x)
    return F.cross_entropy(getattr(found, "logits", found), y)


def pictures(size: int = 16) -> tuple[Tensor, Tensor]:
    """Pictures and their classes."""
    return torch.randn(BATCH, 3, size, size), torch.randint(0, 4, (BATCH,))


# -- of transformers ----------------------------------------------------------------------------------


def language(family: str, **settings: Any) -> Made:
    """A causal language model of transformers."""
    names = {"hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = _of(f"{family}Config")(**{"vocab_size": VOCABULARY, **names, "use_cache": False, **settings})
    head = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    return _of(family + head)(config), next_token_loss, (tokens(),)


def labelled(name: str, head: str, inputs: Callable[[], tuple[Tensor, ...]], **settings: Any) -> Made:
    """A classifier of transformers."""
    config = _of(f"{name}Config")(**settings)
    return _of(f"{name}For{head}")(config), class_loss, inputs()


def _of(name: str) -> Any:
    return getattr(importlib.import_module("transformers"), name)


def masked_language() -> Made:
    """BERT, whose loss is that of masked tokens, with padding in the batch."""
    config = _of("BertConfig")(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )

    def loss(model: nn.Module, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        return model(input_ids=ids, attention_mask=mask, labels=labels).loss

    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    return _of("BertForMaskedLM")(config), loss, (ids, mask, torch.where(ids < 8, ids, -100))


def sequence_to_sequence() -> Made:
    """T5, from one sequence to another."""
    config = _of("T5Config")(
        vocab_size=VOCABULARY, d_model=WIDTH, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0
    )
    config.use_cache, config.pad_token_id, config.decoder_start_token_id = False, 0, 0

    def loss(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
        return model(input_ids=ids, labels=labels).loss

    return _of("T5ForConditionalGeneration")(config), loss, (tokens()[:, 1:].clone(), tokens()[:, 1:].clone())


# -- language models, written by hand -------------------------------------------------------------------


class Block(nn.Module):
    """nanoGPT's block; `dropout` as there."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(dropout)
        )
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        """Attention, then the MLP."""
        b, t, c = x.shape
        q, k, v = (y.view(b, t, 2, c // 2).transpose(1, 2) for y in self.qkv(self.first(x)).split(c, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).contiguous().view(b, t, c))
        return x + self.mlp(self.second(x))


class NanoGPT(nn.Module):
    """nanoGPT with tied embeddings."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class ComplexLlama(nn.Module):
    """Llama as Meta published it: rotary embeddings by products of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.norm, self.wq, self.wk = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wv, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        frequencies = torch.outer(torch.arange(LENGTH).float(), 1.0 / 100 ** (torch.arange(0, 8, 2).float() / 8))
        self.register_buffer("turns", torch.polar(torch.ones_like(frequencies), frequencies))

    def rotated(self, x: Tensor) -> Tensor:
        """Queries or keys, turned by their places."""
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * self.turns[: x.shape[1], None]).flatten(3).type_as(x)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        x = self.norm(self.tokens(ids))
        q, k, v = (w(x).view(*x.shape[:2], 2, WIDTH // 2) for w in (self.wq, self.wk, self.wv))
        q, k, v = (y.transpose(1, 2) for y in (self.rotated(q), self.rotated(k), v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(y.transpose(1, 2).reshape(x.shape))


class Recurrent(nn.Module):
    """A language model around an LSTM or a GRU."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.tokens, self.rnn = nn.Embedding(VOCABULARY, WIDTH), kind(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        return self.head(self.rnn(self.tokens(ids))[0])


class Encoder(nn.Module):
    """nn.TransformerEncoder over tokens with a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)
        self.tokens, self.encoder = nn.Embedding(VOCABULARY, WIDTH), nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.head(self.encoder(self.tokens(ids), mask=mask, is_causal=True))


class Routed(nn.Module):
    """A mixture of experts without data-dependent sizes: each expert computes all tokens, weighted."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.router = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        x = self.tokens(ids)
        weights, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        gates = torch.zeros(*x.shape[:-1], 4).scatter(-1, chosen, weights)
        return self.head(sum(gates[..., i : i + 1] * F.silu(expert(x)) for i, expert in enumerate(self.experts)))


# -- pictures -------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """A basic block of ResNet."""

    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(width, out, 3, stride, 1, bias=False), nn.Conv2d(out, out, 3, 1, 1)
        self.norm1, self.norm2 = nn.BatchNorm2d(out), nn.BatchNorm2d(out)
        self.down = nn.Sequential(nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        """Two convolutions and the way around them."""
        y = F.relu(self.norm1(self.first(x)), inplace=True)
        y = self.norm2(self.second(y))
        y += self.down(x)
        return F.relu(y, inplace=True)


def resnet() -> nn.Module:
    """ResNet, in torchvision's style."""
    stem = [nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    end = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)]
    return nn.Sequential(*stem, Residual(8, 8, 1), Residual(8, 16, 2), *end)


class LayerNorm2d(nn.LayerNorm):
    """A layer norm over the channels of pictures."""

    def forward(self, x: Tensor) -> Tensor:
        """Permute, norm, permute."""
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    """A block of ConvNeXt with layer scale, and its stem and head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Sequential(nn.Conv2d(3, 8, 4, 4), LayerNorm2d(8)), nn.LayerNorm(8)
        self.depthwise, self.up, self.down = nn.Conv2d(8, 8, 7, padding=3, groups=8), nn.Linear(8, 32), nn.Linear(32, 8)
        self.scale, self.head = nn.Parameter(torch.full((8,), 1e-2)), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Classes."""
        x = self.stem(x)
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.scale * self.down(F.gelu(self.up(y)))
        return self.head((x + y.permute(0, 3, 1, 2)).mean([-2, -1]))


class SqueezeExcite(nn.Module):
    """A gate of channels, as in MobileNetV3 and EfficientNet."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(width, 4, 1), nn.Conv2d(4, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """The gated picture."""
        return x * F.hardsigmoid(self.up(F.relu(self.down(x.mean((2, 3), keepdim=True)))))


def mobilenet() -> nn.Module:
    """MobileNetV3: depthwise convolutions, hardswish, gates of channels."""
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.Hardswish(inplace=True)),
        *(nn.Conv2d(8, 8, 3, 1, 1, groups=8, bias=False), nn.BatchNorm2d(8), nn.ReLU6(inplace=True), SqueezeExcite(8)),
        *(nn.Conv2d(8, 16, 1, bias=False), nn.BatchNorm2d(16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)),
    )


class ViT(nn.Module):
    """A vision transformer, in timm's style."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.start = nn.Conv2d(3, WIDTH, 4, 4), nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.places = nn.Parameter(torch.randn(1, 17, WIDTH) * 0.02)
        self.block, self.norm, self.head = Block(0.0), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Classes."""
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.start.expand(x.shape[0], -1, -1), x], 1) + self.places
        return self.head(self.norm(self.block(x))[:, 0])


class UNet(nn.Module):
    """U-Net: down, up by transposed convolution and by interpolation, and concatenations."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        self.up, self.norm = nn.ConvTranspose2d(16, 8, 2, 2), nn.GroupNorm(2, 8)
        self.last = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        """A class of each pixel."""
        one = F.relu(self.norm(self.first(x)))
        two = F.relu(self.second(F.max_pool2d(one, 2)))
        return self.last(torch.cat([one, self.up(two)], dim=1))


class Mixer(nn.Module):
    """MLP-Mixer."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm = nn.Conv2d(3, WIDTH, 4, 4), nn.LayerNorm(WIDTH)
        self.places = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.channels = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Classes."""
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = x + self.places(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return self.head((x + self.channels(self.norm(x))).mean(dim=1))


class Upsampler(nn.Module):
    """A decoder that enlarges by interpolation, as in diffusion models, and by pixel shuffle."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (
            nn.Conv2d(3, 8, 3, 2, 1),
            nn.Conv2d(8, 16, 3, 1, 1),
            nn.Conv2d(4, 3, 3, 1, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        """A picture of the same size."""
        y = self.second(F.silu(self.first(x)))
        return self.last(F.pixel_shuffle(y, 2)) + F.interpolate(F.avg_pool2d(x, 2), scale_factor=2, mode="nearest")


class Autoencoder(nn.Module):
    """A variational autoencoder, which draws."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.mean, self.spread = nn.Linear(48, 16), nn.Linear(16, 4), nn.Linear(16, 4)
        self.decoder = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 48), nn.Sigmoid())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The picture again, and the mean and spread of its code."""
        y = F.relu(self.encoder(x.flatten(1)))
        mean, spread = self.mean(y), self.spread(y)
        return self.decoder(mean + torch.randn_like(mean) * (0.5 * spread).exp()), mean, spread


# -- other data -----------------------------------------------------------------------------------------


class Recommender(nn.Module):
    """DLRM: bags of embeddings, dot products between features, an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(16, 8, mode="sum") for _ in range(2))
        self.dense, self.top = nn.Linear(4, 8), nn.Linear(11, 1)

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        """The odds of a click."""
        features = [self.dense(numbers), *(bag(categories[:, i]) for i, bag in enumerate(self.bags))]
        stacked = torch.stack(features, dim=1)
        products = torch.bmm(stacked, stacked.transpose(1, 2))
        i, j = torch.tril_indices(3, 3, offset=-1)
        return self.top(torch.cat([features[0], products[:, i, j]], dim=1)).squeeze(-1)


class GraphNet(nn.Module):
    """A graph neural network: messages along edges, added by `index_add`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """A class of each node."""
        h = F.relu(self.first(x))
        sent = torch.zeros_like(h).index_add(0, edges[:, 1], h[edges[:, 0]])
        degree = torch.ones(len(x)).scatter_add(0, edges[:, 1], torch.ones(len(edges)))
        return self.second(h + sent / degree[:, None])


class Waves(nn.Module):
    """WaveNet: dilated causal convolutions with gates."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.end = nn.Conv1d(1, 8, 1), nn.Conv1d(8, 4, 1)
        self.layers = nn.ModuleList(nn.Conv1d(8, 16, 2, dilation=2**i) for i in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """A class of each sample."""
        x = self.start(x)
        for i, layer in enumerate(self.layers):
            gate, value = layer(F.pad(x, (2**i, 0))).chunk(2, dim=1)
            x = x + torch.sigmoid(gate) * torch.tanh(value)
        return self.end(x)


def _recommender() -> Made:
    def loss(model: nn.Module, numbers: Tensor, categories: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(numbers, categories), y)

    return Recommender(), loss, (torch.randn(4, 4), torch.randint(0, 16, (4, 2, 3)), torch.rand(4).round())


def _graph_net() -> Made:
    def loss(model: nn.Module, x: Tensor, edges: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x, edges), y)

    return GraphNet(), loss, (torch.randn(6, 8), torch.randint(0, 6, (10, 2)), torch.randint(0, 4, (6,)))


def _autoencoder() -> Made:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        found, mean, spread = model(x)
        kept = F.binary_cross_entropy(found, x.flatten(1), reduction="sum")
        return kept - 0.5 * torch.sum(1 + spread - mean.pow(2) - spread.exp())

    return Autoencoder(), loss, (torch.rand(BATCH, 3, 4, 4),)


def _pixels(model: nn.Module) -> Made:
    x = torch.randn(BATCH, 3, 16, 16)
    return model, class_loss, (x, torch.randint(0, 4, (BATCH, 16, 16)))


def _upsampler() -> Made:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return F.mse_loss(model(x), x)

    return Upsampler(), loss, (torch.randn(BATCH, 3, 16, 16),)


def _waves() -> Made:
    return Waves(), class_loss, (torch.randn(BATCH, 1, 16), torch.randint(0, 4, (BATCH, 16)))


def _half_precision() -> Made:
    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return next_token_loss(model, tokens)

    return NanoGPT(), loss, (tokens(),)


MODELS: dict[str, Callable[[], Made]] = {
    "transformers Llama": functools.partial(language, "Llama", num_key_value_heads=1),
    "transformers Mistral": functools.partial(language, "Mistral", num_key_value_heads=1),
    "transformers Qwen3": functools.partial(language, "Qwen3", num_key_value_heads=1, head_dim=8),
    "transformers Gemma2": functools.partial(language, "Gemma2", num_key_value_heads=1, head_dim=8),
    "transformers Phi3": functools.partial(language, "Phi3", num_key_value_heads=1, pad_token_id=0),
    "transformers GPT2": functools.partial(language, "GPT2", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    "transformers GPTNeoX": functools.partial(language, "GPTNeoX"),
    "transformers OPT": functools.partial(language, "OPT", ffn_dim=32, word_embed_proj_dim=WIDTH, dropout=0.0),
    "transformers BERT": masked_language,
    "transformers T5": sequence_to_sequence,
    "transformers ViT": functools.partial(
        labelled,
        "ViT",
        "ImageClassification",
        pictures,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=16,
        patch_size=4,
        num_labels=4,
    ),
    "nanoGPT": lambda: (NanoGPT(), next_token_loss, (tokens(),)),
    "nanoGPT, dropout": lambda: (NanoGPT(0.1), next_token_loss, (tokens(),)),
    "nanoGPT, autocast": _half_precision,
    "Llama, complex RoPE": lambda: (ComplexLlama(), next_token_loss, (tokens(),)),
    "LSTM": lambda: (Recurrent(nn.LSTM), next_token_loss, (tokens(),)),
    "GRU": lambda: (Recurrent(nn.GRU), next_token_loss, (tokens(),)),
    "nn.TransformerEncoder": lambda: (Encoder(), next_token_loss, (tokens(),)),
    "mixture of experts, all computed": lambda: (Routed(), next_token_loss, (tokens(),)),
    "ResNet": lambda: (resnet(), class_loss, pictures(32)),
    "ConvNeXt": lambda: (ConvNeXt(), class_loss, pictures()),
    "MobileNetV3": lambda: (mobilenet(), class_loss, pictures()),
    "ViT": lambda: (ViT(), class_loss, pictures()),
    "U-Net": lambda: _pixels(UNet()),
    "MLP-Mixer": lambda: (Mixer(), class_loss, pictures()),
    "upsampler": _upsampler,
    "VAE": _autoencoder,
    "DLRM": _recommender,
    "graph network": _graph_net,
    "WaveNet": _waves,
}
