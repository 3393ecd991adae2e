"""The models of `benchmarks/harness/models.py` in PyTorch, from the same arrays.

Parameters have the names of the JAX models. Images and the weights of convolutions are in PyTorch's
order of dims.
"""

import itertools

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - PyTorch's name


class Layer(nn.Module):
    def __init__(self, w, b):
        super().__init__()
        self.w, self.b = nn.Parameter(w), nn.Parameter(b)

    def forward(self, x):
        return x @ self.w + self.b


class Mlp(nn.ModuleList):
    def __init__(self, params):
        pairs = [(params[f"{i}.w"], params[f"{i}.b"]) for i in range(len(params) // 2)]
        super().__init__(itertools.starmap(Layer, pairs))

    def forward(self, batch):
        x = batch["x"]
        *hidden, last = self
        for layer in hidden:
            x = F.gelu(layer(x), approximate="tanh")
        return F.mse_loss(last(x), batch["y"])


class Convolution(nn.Module):
    def __init__(self, w, b, stride):
        super().__init__()
        self.w, self.b, self._stride = nn.Parameter(w), nn.Parameter(b), stride

    def forward(self, x):
        return F.silu(F.conv2d(x, self.w, self.b, self._stride, padding=1))


class ConvNet(nn.Module):
    def __init__(self, params):
        super().__init__()
        layers = [
            Convolution(params[f"layers.{i}.w"], params[f"layers.{i}.b"], 1 + i % 2)
            for i in range(len(params) // 2)
        ]
        self.layers = nn.ModuleList(layers)
        self.head = nn.Parameter(params["head"])

    def forward(self, batch):
        x = batch["image"]
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(x.mean((2, 3)) @ self.head, batch["label"].long())


class Block(nn.Module):
    def __init__(self, params):
        super().__init__()
        for name, value in params.items():
            setattr(self, name, nn.Parameter(value))

    def forward(self, x):
        x = x + self._attention(rms_norm(x, self.norm1))
        hidden = F.gelu(rms_norm(x, self.norm2) @ self.up, approximate="tanh")
        return x + hidden @ self.down

    def _attention(self, x):
        num_rows, length, dim = x.shape
        heads = (num_rows, length, dim // 32, 32)
        q, k, v = (part.view(heads).transpose(1, 2) for part in (x @ self.qkv).chunk(3, dim=-1))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return found.transpose(1, 2).reshape(x.shape) @ self.out


class Transformer(nn.Module):
    def __init__(self, params):
        super().__init__()
        blocks = {}
        for name, value in params.items():
            if name.startswith("blocks."):
                _, number, own = name.split(".")
                blocks.setdefault(int(number), {})[own] = value
            else:
                setattr(self, name, nn.Parameter(value))
        self.blocks = nn.ModuleList([Block(blocks[i]) for i in sorted(blocks)])

    def forward(self, batch):
        inputs, targets = batch["text"][:, :-1].long(), batch["text"][:, 1:].long()
        x = F.embedding(inputs, self.bytes) + self.positions
        for block in self.blocks:
            x = block(x)
        logits = rms_norm(x, self.norm) @ self.head
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def rms_norm(x, scale):
    return F.rms_norm(x, x.shape[-1:], scale, eps=1e-6)


MODELS = {"mlp": Mlp, "conv": ConvNet, "transformer": Transformer}


def model_of(name, params):
    """Return a new model with these initial parameters, NumPy arrays by the names in JAX."""
    return MODELS[name]({key: _ordered(x, (3, 2, 0, 1)).clone() for key, x in params.items()})


def layers_of(model):
    """Return the layers that are sharded one by one."""
    if isinstance(model, Mlp):
        return list(model)
    return list(model.blocks if isinstance(model, Transformer) else model.layers)


# JAX has [height, width, in, out] for weights and [rows, height, width, channels] for images.
def batch_of(batch):
    """Return a batch in PyTorch's order of dims, from NumPy arrays."""
    return {name: _ordered(x, (0, 3, 1, 2)) for name, x in batch.items()}


def from_torch(x):
    """Return a parameter as NumPy array, with the dims of the JAX models."""
    found = x.detach().numpy()
    return found.transpose(2, 3, 1, 0) if found.ndim == 4 else found


def _ordered(x, dims):
    return torch.from_numpy(np.ascontiguousarray(x.transpose(dims) if x.ndim == 4 else x))
