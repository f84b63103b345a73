"""One bit flip and one forward, as each peer does it. Peers are installed apart (``make bench``) and only measured.

PyTorchFI 0.6.0 draws the layer first and copies the model for each declaration; MRFI 2.1.0 hooks every module.
"""

from __future__ import annotations

import importlib.util
import random
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

FOLDER = Path(__file__).parents[1] / "build" / "peers"
Trial = Callable[[], object]
LAYERS: tuple[type[nn.Module], ...] = (nn.Conv2d, nn.Linear)


def available() -> bool:
    """Whether the peers are installed; puts their folder on the path."""
    if FOLDER.is_dir() and str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    return all(importlib.util.find_spec(name) for name in ("pytorchfi", "mrfi"))


def hand(model: nn.Module, x: Tensor) -> Trial:
    """Flip a bit of a uniformly drawn weight in place, run, flip it back."""
    words = [p.data.view(torch.int32).view(-1) for p in model.parameters()]
    sizes = torch.tensor([w.numel() for w in words]).cumsum(0)

    def trial() -> Tensor:
        at = random.randrange(int(sizes[-1]))
        tensor = int(torch.searchsorted(sizes, at, right=True))
        element, mask = at - int(sizes[tensor] - words[tensor].numel()), 1 << random.randrange(31)
        words[tensor][element] ^= mask
        y = model(x)
        words[tensor][element] ^= mask
        return y

    return trial


def hand_neuron(model: nn.Module, x: Tensor) -> Trial:
    """Flip a bit of one output of a layer, drawn uniformly over their neurons, in a forward hook."""
    layers = [m for m in model.modules() if isinstance(m, LAYERS)]
    sizes: list[int] = []
    handles = [m.register_forward_hook(lambda m, i, y: sizes.append(y.numel())) for m in layers]
    model(x)
    for handle in handles:
        handle.remove()

    def trial() -> Tensor:
        (layer,) = random.choices(range(len(layers)), weights=sizes)
        element, mask = random.randrange(sizes[layer]), 1 << random.randrange(31)

        def corrupt(module: nn.Module, inputs: object, y: Tensor) -> None:
            y.view(torch.int32).view(-1)[element] ^= mask

        handle = layers[layer].register_forward_hook(corrupt)
        try:
            return model(x)
        finally:
            handle.remove()

    return trial


def _flip(data: Tensor, location: tuple[int, ...]) -> float:
    word = struct.unpack("I", struct.pack("f", data[location].item()))[0]
    return float(struct.unpack("f", struct.pack("I", word ^ (1 << random.randrange(32))))[0])


class Tokens(nn.Module):
    """For PyTorchFI, which tries a model out on random floats: takes them for token ids."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x.abs().long() if x.is_floating_point() else x)


def _injector(model: nn.Module, x: Tensor, layers: Sequence[type[nn.Module]]):  # type: ignore[no-untyped-def]
    from pytorchfi.core import fault_injection

    model = model if x.is_floating_point() else Tokens(model)
    return fault_injection(model, x.shape[0], list(x.shape[1:]), list(layers))


def pytorchfi(model: nn.Module, x: Tensor, layers: Sequence[type[nn.Module]] = (nn.Conv2d,)) -> Trial:
    """A random weight through ``declare_weight_fi`` with a bit-flip function."""
    from pytorchfi.weight_error_models import random_weight_location

    injector = _injector(model, x, layers)

    def trial() -> Tensor:
        layer, k, c, h, w = random_weight_location(injector)
        return injector.declare_weight_fi(function=_flip, layer_num=layer, k=k, dim1=c, dim2=h, dim3=w)(x)

    return trial


def pytorchfi_neuron(model: nn.Module, x: Tensor) -> Trial:
    """A random neuron through ``random_neuron_inj``, which gives it a random value."""
    from pytorchfi.neuron_error_models import random_neuron_inj

    injector = _injector(model, x, LAYERS)
    return lambda: random_neuron_inj(injector)(x)


def _mrfi(model: nn.Module, x: Tensor, what: dict[str, object], where: dict[str, object]) -> Trial:
    from mrfi import MRFI, EasyConfig

    injection = {
        **what,
        "enabled": True,
        "selector": {"method": "RandomPositionByNumber", "n": 1},
        "error_mode": {"method": "FloatRandomBitFlip", "floattype": "float32"},
        **where,
    }
    injected = MRFI(model, EasyConfig({"faultinject": [injection]}))
    return lambda: injected(x)


def _where(layers: str) -> dict[str, object]:
    return {"module_type": ["Conv2d", "Linear"]} if layers == "all" else {"module_fullname": [layers]}


def mrfi(model: nn.Module, x: Tensor, layers: str) -> Trial:
    """A random float bit flip of one weight per configured layer: the layer of that name, or ``all`` of them."""
    return _mrfi(model, x, {"type": "weight", "name": ["weight"]}, _where(layers))


def mrfi_neuron(model: nn.Module, x: Tensor, layers: str) -> Trial:
    """A random float bit flip of one output per configured layer: the layer of that name, or ``all`` of them."""
    return _mrfi(model, x, {"type": "activation_out"}, _where(layers))
