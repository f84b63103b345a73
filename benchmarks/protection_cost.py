"""What protection costs an inference, measured directly: the guard's own calls are timed, not the difference of two runs.

    python -m benchmarks.protection_cost [--device cuda] [--calls 20] [--detector dr-dna] [--mode end]

On a CPU the CPU time of the process counts, in one thread; on a GPU guarded and bare calls run in turn between CUDA events.
Prints one row per model and shape: time of a bare call, share of the guard, layers that are read and every how many positions,
memory of the detector and of parity as a share of the weights.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.monitor_cost import Clock
from unsilent.protection.layer_watch import LayerWatch
from unsilent.protection.live_readings import LiveReadings
from unsilent.protection.profile import Profile, make_profile
from unsilent.protection.protect import ProtectedModel

ENTRIES = {
    LayerWatch: ("_begin_pass", "_end_pass", "_ran"),
    ProtectedModel: ("_margins_of_parts", "_conclude"),
    LiveReadings: ("begin",),
}
CLEAN, RATE = 64, 0.05
LLAMAS = {"cpu": (512, 1408, 6, 4096), "cuda": (1024, 2816, 24, 32000)}
"""Width, width inside blocks, blocks and vocabulary of the Llama on each device."""


class Case(NamedTuple):
    """A model and a call of it.

    Attributes:
        calls: Batches that are timed, by name.
        clean: Batches for calibration.
    """

    name: str
    model: nn.Module
    calls: Mapping[str, Any]
    clean: list[Any]


def cases(device: str) -> Iterator[Case]:
    """The models, with clean batches and the calls that are timed."""
    from transformers import LlamaConfig, LlamaForCausalLM, ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    width, inner, blocks, vocabulary = LLAMAS[device]
    config = LlamaConfig(
        hidden_size=width, intermediate_size=inner, num_hidden_layers=blocks, num_attention_heads=8, num_key_value_heads=8,
        vocab_size=vocabulary, max_position_embeddings=512,
    )  # fmt: skip
    llama = (
        LlamaForCausalLM(config).eval().to(device=device, dtype=torch.float32 if device == "cpu" else torch.bfloat16)
    )

    def tokens(samples: int, length: int) -> dict[str, Tensor]:
        return {"input_ids": torch.randint(vocabulary, (samples, length), device=device)}

    shapes = {"1 x 512": (1, 512), "32 x 64": (32, 64), "1 x 1": (1, 1)}
    shapes |= {"32 x 512": (32, 512)} if device == "cuda" else {}
    yield Case("llama", llama, {k: tokens(*v) for k, v in shapes.items()}, [tokens(1, 512) for _ in range(CLEAN)])

    vit = ViTForImageClassification(
        ViTConfig(
            hidden_size=512,
            intermediate_size=2048,
            num_hidden_layers=6,
            num_attention_heads=8,
            image_size=96,
            patch_size=16,
        )
    )
    for name, model, size in (("vit", vit, 96), ("resnet18", plain_resnet(), 64)):

        def images(samples: int, size: int = size) -> Tensor:
            return torch.randn(samples, 3, size, size, device=device)

        yield Case(
            name, model.eval().to(device), {"32": images(32), "1": images(1)}, [images(32) for _ in range(CLEAN // 16)]
        )


class Block(nn.Module):
    """Two 3x3 convolutions with batch norm around a shortcut."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(after), nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.shortcut = nn.Identity() if before == after else nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[n, before, h, w] -> [n, after, h / stride, w / stride]."""
        inner = self.bn1(self.conv1(x)).relu()
        return torch.relu(self.bn2(self.conv2(inner)) + self.shortcut(x))


def plain_resnet() -> nn.Module:
    """A residual network of 18 layers for small images, 11 M parameters."""
    widths = [64, 64, 128, 256, 512]
    blocks = [
        Block(before if first else after, after, 2 if first and before != after else 1)
        for before, after in itertools.pairwise(widths)
        for first in (True, False)
    ]
    stem = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 100))


def call(model: Any, batch: Any) -> Any:
    """One call."""
    return model(**batch) if isinstance(batch, dict) else model(batch)


def cpu_share(model: nn.Module, guarded: ProtectedModel, clock: Clock, batch: Any, calls: int) -> tuple[float, float]:
    """Milliseconds of a bare call, and the guard's share of it, medians."""
    times, shares = [], []
    for number in range(calls + 2):
        clock.cpu = 0.0
        before = time.process_time()
        call(guarded, batch)
        whole = time.process_time() - before
        if number >= 2:
            times.append(1000 * (whole - clock.cpu))
            shares.append(clock.cpu / (whole - clock.cpu))
    return statistics.median(times), statistics.median(shares)


def gpu_share(model: nn.Module, guarded: ProtectedModel, batch: Any, calls: int) -> tuple[float, float]:
    """Milliseconds of a bare call, and how much longer a guarded one takes, medians of calls in turn."""

    def one(run: Callable[..., Any]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call(run, batch)
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)

    guarded_ms, bare_ms = [], []
    for number in range(calls + 3):
        pair = one(guarded), one(model)  # hooks do nothing in a call of the model itself
        if number >= 3:
            guarded_ms.append(pair[0])
            bare_ms.append(pair[1])
    bare = statistics.median(bare_ms)
    return bare, statistics.median(guarded_ms) / bare - 1


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu", choices=list(LLAMAS))
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--detector", default="dr-dna")
    parser.add_argument("--mode", default="end")
    parser.add_argument("--recovery", default="repair")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print("model      parameters  call      bare ms  guard %  layers  stride  memory %")
    clock = Clock()
    if asked.device == "cpu":
        for owner, names in ENTRIES.items():
            for name in names:
                setattr(owner, name, clock.timed(getattr(owner, name)))
    with torch.no_grad():
        for case in cases(asked.device):
            profile: Profile = make_profile(case.model, case.clean, asked.detector, rate=RATE)
            part: Any = profile.parts[0]
            size = sum(p.numel() * p.element_size() for p in case.model.parameters())
            with ProtectedModel(case.model, profile, asked.mode, [asked.recovery] if asked.recovery else []) as guarded:
                for name, batch in case.calls.items():
                    if asked.device == "cpu":
                        bare, share = cpu_share(case.model, guarded, clock, batch, asked.calls)
                    else:
                        bare, share = gpu_share(case.model, guarded, batch, asked.calls)
                    count = sum(p.numel() for p in case.model.parameters())
                    print(
                        f"{case.name:10} {count:10,}  {name:8} {bare:8.2f} {100 * share:8.2f} {len(part.layers):7} "
                        f"{part.readers.stride:7} {100 * guarded.nbytes / size:9.2f}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
