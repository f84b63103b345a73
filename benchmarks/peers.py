"""One weight bit flip and one forward, as each peer does it. Peers are installed apart (``make bench``) and only measured.

PyTorchFI 0.6.0 draws the layer first and copies the model for each declaration; MRFI 2.1.0 hooks every module.
"""

from __future__ import annotations

import importlib.util
import random
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

FOLDER = Path(__file__).parents[1] / "build" / "peers"
Trial = Callable[[], object]


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


def _flip(data: Tensor, location: tuple[int, ...]) -> float:
    word = struct.unpack("I", struct.pack("f", data[location].item()))[0]
    return float(struct.unpack("f", struct.pack("I", word ^ (1 << random.randrange(32))))[0])


def pytorchfi(model: nn.Module, x: Tensor) -> Trial:
    """A random weight through ``declare_weight_fi`` with a bit-flip function."""
    from pytorchfi.core import fault_injection
    from pytorchfi.weight_error_models import random_weight_location

    injector = fault_injection(model, x.shape[0], list(x.shape[1:]), [nn.Conv2d])

    def trial() -> Tensor:
        layer, k, c, h, w = random_weight_location(injector)
        return injector.declare_weight_fi(function=_flip, layer_num=layer, k=k, dim1=c, dim2=h, dim3=w)(x)

    return trial


def mrfi(model: nn.Module, x: Tensor, layers: str) -> Trial:
    """A random float bit flip of one weight per configured layer: ``one`` layer or ``all`` of them."""
    from mrfi import MRFI, EasyConfig

    config = EasyConfig(
        {
            "faultinject": [
                {
                    "type": "weight",
                    "name": ["weight"],
                    "enabled": True,
                    "selector": {"method": "RandomPositionByNumber", "n": 1},
                    "error_mode": {"method": "FloatRandomBitFlip", "floattype": "float32"},
                    **(
                        {"module_type": ["Conv2d", "Linear"]}
                        if layers == "all"
                        else {"module_fullname": ["layers.2.0.conv1"]}
                    ),
                }
            ]
        }
    )
    injected = MRFI(model, config)
    return lambda: injected(x)
