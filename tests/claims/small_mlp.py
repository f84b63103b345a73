"""A small trained model whose every single bit flip can be tried: 64 pixels, 10 and 8 neurons, 10 digits; 828 parameters."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from sklearn.neural_network import MLPClassifier
from torch import nn

import unsilent

SAMPLES = 64


def make() -> unsilent.Workload:
    """Trained on two thirds of the digits; evaluated on 64 of the others."""
    pixels, digits = load_digits(return_X_y=True)
    pixels = pixels / 16
    trained = MLPClassifier((10, 8), max_iter=1000, random_state=0).fit(pixels[:1200], digits[:1200])
    model = nn.Sequential()
    for i, (weight, bias) in enumerate(zip(trained.coefs_, trained.intercepts_, strict=True)):
        layer = nn.Linear(*weight.shape)
        with torch.no_grad():
            layer.weight.copy_(torch.from_numpy(weight.T.copy()))
            layer.bias.copy_(torch.from_numpy(bias))
        model.add_module(f"layer{i}", layer)
        if i < 2:
            model.add_module(f"relu{i}", nn.ReLU())
    return unsilent.Workload(model.eval(), [torch.from_numpy(pixels[1200 : 1200 + SAMPLES]).float()], name="small-mlp")
