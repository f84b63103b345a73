"""Small models of every kind that operations are corrupted in, with inputs: (model, batch, run)."""

from __future__ import annotations

import torch
from torch import nn


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


class Cnn(nn.Module):
    """Convolution, batch norm, in-place ReLU, a residual with in-place addition, pooling, concatenation."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.act = nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(6 * 9, 5)

    def forward(self, x):
        y = self.act(self.norm(self.conv(x)))
        y += 1
        y = torch.cat([y * y, x], 1)
        return self.head(self.pool(y).flatten(1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(4, 5, batch_first=True)
        self.lstm = nn.LSTM(5, 6, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.lstm(self.gru(x)[0])[0][:, -1])


def encoder(fast):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=not fast)
    return layer if fast else nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def gpt():
    transformers = __import__("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "n_positions": 16, "n_embd": 8, "n_layer": 2, "n_head": 2}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=None, pad_token_id=39)
    return transformers.GPT2LMHeadModel(config).eval()


def generate(model, ids, new=3):
    mask = torch.ones_like(ids)
    return model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=39)


def call(model, batch):
    return model(batch)


def subjects():
    """Name -> (model, batch, run), made anew."""
    torch.manual_seed(1)
    return {
        "cnn": (Cnn().eval(), torch.randn(2, 2, 6, 6, generator=seeded()), call),
        "encoder": (encoder(fast=False).eval(), torch.randn(2, 3, 8, generator=seeded()), call),
        "fast encoder": (encoder(fast=True).eval(), torch.randn(2, 3, 8, generator=seeded()), call),
        "recurrent": (Recurrent().eval(), torch.randn(2, 3, 4, generator=seeded()), call),
        "gpt": (gpt(), torch.randint(0, 39, (2, 4), generator=seeded()), generate),
    }
