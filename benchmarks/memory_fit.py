"""Do the failure rates of memories agree with an accelerator that is simulated event by event?

``python -m benchmarks.memory_fit WORKLOAD [--weights FILE --data FILE] [--trials N] [--events N N N]``, where WORKLOAD is
``cifar-resnet32`` or ``transformer`` (one of our own, trained here on scikit-learn's digits).

The simulation shares nothing with the campaign but model, inputs and the description's numbers. An event falls on a random
address of a memory and a random moment of a call. Activations lie at the addresses of whatever storages exist at that moment,
one after the other; an event at an address without one is dead. The bit is flipped in the memory itself, and the call goes on.
Weights are flipped before a call. An operation takes the bytes of its operands and result, divided by the bandwidth of their
memory.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import unsilent
from unsilent.basics.interval import Interval
from unsilent.statistics import Stratum, stratified
from unsilent.statistics.comparing import difference
from unsilent.workloads import load

RATES = {"hbm": 70.0, "dram": 20.0, "sram": 900.0}
"""Events in 1e9 hours and 2**20 bits."""
BANDWIDTHS = {"hbm": 800e9, "dram": 25e9, "sram": 2e12}
PATTERNS = {
    "hbm": {"bitflip": 0.7, "bitflip:run=4": 0.3},
    "dram": {"bitflip": 1.0},
    "sram": {"bitflip": 0.8, "burst:length=2": 0.2},
}
CONFIDENCE = 0.95
DEVIATION = 0.01
"""An output is incorrect where a number of it changes by more than this share of the largest one."""


class Block(nn.Module):
    """Attention and two layers, each with a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.first(x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        scores = parts[0] @ parts[1].transpose(-2, -1) * (width // self.heads) ** -0.5
        mixed = (scores.softmax(-1) @ parts[2]).transpose(1, 2).reshape(batch, length, width)
        x = x + self.out(mixed)
        return x + self.down(torch.relu(self.up(self.second(x))))


class Transformer(nn.Module):
    """Rows of an image as tokens."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.position = nn.Parameter(torch.zeros(8, width))
        self.blocks = nn.Sequential(Block(width, 4), Block(width, 4))
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(x) + self.position).mean(1))


def transformer(samples: int) -> tuple[nn.Module, list[torch.Tensor]]:
    """The model, trained, and inputs one by one."""
    from sklearn.datasets import load_digits

    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for step in range(400):
        chosen = torch.randint(0, 1400, (64,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
        optimizer.step()
    model.eval()
    print(f"accuracy {(model(images[1400:]).argmax(1) == labels[1400:]).float().mean().item():.3f}")
    return model, list(images[1400 : 1400 + samples].split(1))


def deviates(golden: torch.Tensor, output: torch.Tensor, batch: Any) -> torch.Tensor:
    """The judge of the campaign."""
    return (output - golden).abs().amax(1) > DEVIATION * golden.abs().amax(1)


def memory_of(parameter: str) -> str:
    """Blocks of layers are in HBM, the rest of the weights in DRAM."""
    return "hbm" if parameter.startswith(("layer", "blocks")) else "dram"


def description(model: nn.Module, with_parity: bool = False) -> str:
    """The three memories as a file; ``with_parity``: of each word of the SRAM."""
    tops = {name.partition(".")[0] for name, _ in model.named_parameters()}
    holds = {m: [f"param:{top}*" for top in sorted(tops) if memory_of(top) == m] for m in ("hbm", "dram")}
    holds["sram"] = ["op:*", "input:*"]
    lines = ['name = "three"', 'description = "three memories"', "sources = []"]
    for memory, rate in RATES.items():
        reload = "" if memory == "sram" else "reload = 3600.0"
        if memory == "sram" and with_parity:
            reload = 'protection = "parity"\ncode_word = 32'
        lines += [
            f"[memories.{memory}]", 'size = "1GiB"', f"fit_per_mbit = {rate}", f'bandwidth = "{BANDWIDTHS[memory]:.0f}"', reload,
            f"holds = {holds[memory]}".replace("'", '"'), 'evidence = "assumed"',
        ]  # fmt: skip
        for number, (model_text, share) in enumerate(PATTERNS[memory].items()):
            lines += [
                f"[memories.{memory}.patterns.p{number}]",
                f'model = "{model_text}"',
                f"share = {share}",
                'evidence = "assumed"',
            ]
    return "\n".join(lines)


# -- the simulation ----------------------------------------------------------------------------------------------------


def flip(words: torch.Tensor, bit: int, pattern: str) -> None:
    """Flip what an event at this bit flips, in memory as 32-bit words."""
    word, place = divmod(bit, 32)
    count = 4 if pattern == "bitflip:run=4" else 1
    mask = 1 << place
    if pattern == "burst:length=2":
        place = place * 31 // 32  # within the word; the lowest place is drawn twice as often
        mask = 3 << place
    signed = mask - 2**32 if mask >= 2**31 else mask
    words[word : word + count] ^= torch.tensor(signed if signed >= -(2**31) else signed + 2**32, dtype=torch.int32)


@dataclass
class Event:
    """At which operation of a call, and which of the addresses."""

    operation: int
    address: int
    pattern: str


class Accelerator(TorchDispatchMode):
    """Runs a call; tells how many bytes move in each operation, and lets an event happen before one."""

    def __init__(self, weights: dict[int, str], inputs: list[torch.Tensor], event: Event | None = None) -> None:
        super().__init__()
        self.weights, self.event = weights, event
        self.seconds: list[float] = []
        self.bits: list[int] = []
        """Of activations, by operation, before it runs."""
        self.hit = False
        self._living = [StorageWeakRef(tensor.untyped_storage()) for tensor in inputs]

    def _storages(self) -> list[torch.UntypedStorage]:
        found, kept = [], []
        for reference in self._living:
            if not reference.expired():
                storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
                if storage is not None:
                    found.append(storage)
                    kept.append(reference)
        self._living = kept
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operands = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        before = {t.untyped_storage()._cdata for t in operands}
        if self.event is not None and self.event.operation == len(self.seconds):
            address = self.event.address
            for storage in self._storages():
                if 0 <= address < 8 * storage.nbytes():
                    words = torch.empty(0, dtype=torch.int32).set_(storage, 0, (storage.nbytes() // 4,))
                    flip(words, address, self.event.pattern)
                    self.hit = True
                address -= 8 * storage.nbytes()
            self.event = None
        alive = 0 if self.event is not None else sum(8 * storage.nbytes() for storage in self._storages())
        result = func(*args, **(kwargs or {}))
        outputs = [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
        written = [
            args[i] for i, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write and i < len(args)
        ]  # fmt: skip
        writes = {t.untyped_storage()._cdata for t in written if isinstance(t, torch.Tensor)}
        fresh = [t for t in outputs if t.untyped_storage()._cdata not in before]
        is_view = not fresh and not writes
        if is_view or "empty" in func._schema.name:
            return result
        moved = [*operands, *(t for t in outputs if t.untyped_storage()._cdata not in before - writes)]
        self.seconds.append(
            sum(t.nbytes / BANDWIDTHS[self.weights.get(t.untyped_storage()._cdata, "sram")] for t in moved)
        )
        self.bits.append(alive)
        self._living += [StorageWeakRef(t.untyped_storage()) for t in fresh[:1]]
        return result


@dataclass
class Call:
    """What a call is without a fault."""

    inputs: torch.Tensor
    golden: torch.Tensor
    ends: np.ndarray
    bits: list[int]


def run(model: nn.Module, call: Call | torch.Tensor, weights: dict[int, str], event: Event | None = None) -> Any:
    """The output of a call, and the accelerator that ran it."""
    inputs = (call.inputs if isinstance(call, Call) else call).clone()
    with torch.no_grad(), Accelerator(weights, [inputs], event) as accelerator:
        output = model(inputs)
    return output, accelerator


def failed(golden: torch.Tensor, output: torch.Tensor) -> bool:
    """Whether a call is incorrect: its output deviates, or has a number that is not finite."""
    return not bool(output.isfinite().all()) or float((output - golden).abs().max() / golden.abs().max()) > DEVIATION


def simulate(model: nn.Module, batches: list[torch.Tensor], events: dict[str, int]) -> dict[str, Interval]:
    """FIT of each memory, from events that are uniform over addresses and time."""
    rng = np.random.default_rng(20260101)
    tensors = {n: t for n, t in [*model.named_parameters(), *model.named_buffers()] if t.is_floating_point()}
    weights = {t.untyped_storage()._cdata: memory_of(name) for name, t in tensors.items()}
    calls = []
    for inputs in batches:
        output, accelerator = run(model, inputs, weights)
        calls.append(Call(inputs, output, np.cumsum([0.0, *accelerator.seconds]), accelerator.bits))
    result = {}
    for memory in RATES:
        mine = [t for name, t in tensors.items() if memory_of(name) == memory]
        ends = np.cumsum([t.numel() for t in mine])
        space = max(max(call.bits) for call in calls) if memory == "sram" else 32 * int(ends[-1])
        lengths = np.array([call.ends[-1] for call in calls])
        texts, shares = list(PATTERNS[memory]), list(PATTERNS[memory].values())
        wrong = np.zeros(events[memory])
        begun = time.perf_counter()
        for number in range(events[memory]):
            pattern = texts[int(rng.choice(len(texts), p=shares))]
            call = calls[int(rng.choice(len(calls), p=lengths / lengths.sum()))]
            address = int(rng.integers(space))
            if memory == "sram":
                operation = int(np.searchsorted(call.ends, rng.random() * call.ends[-1], side="right")) - 1
                if address < call.bits[operation]:
                    output, accelerator = run(model, call, weights, Event(operation, address, pattern))
                    assert accelerator.hit
                    wrong[number] = failed(call.golden, output)
                continue
            which = int(np.searchsorted(ends, address // 32, side="right"))
            words = mine[which].data.view(-1).view(torch.int32)
            kept = words.clone()
            flip(words, address - 32 * int(ends[which] - mine[which].numel()), pattern)
            with torch.no_grad():
                wrong[number] = failed(call.golden, model(call.inputs))
            words.copy_(kept)
        share = stratified([Stratum.of(wrong, 1.0)], CONFIDENCE)
        factor = RATES[memory] / 2**20 * space
        result[memory] = Interval(
            factor * wrong.mean(), factor * share.low, factor * share.high, CONFIDENCE, share.n, "simulated"
        )
        print(f"{memory}: {int(wrong.sum())} of {len(wrong)} events, {time.perf_counter() - begun:.0f} s")
    return result


def main() -> None:
    """Both, and the difference for each memory."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory_fit", description=__doc__)
    parser.add_argument("workload", choices=["cifar-resnet32", "transformer"])
    parser.add_argument("--weights")
    parser.add_argument("--data")
    parser.add_argument("--trials", type=int, default=2000, help="of each stratum of the campaign")
    parser.add_argument("--events", type=int, nargs=3, default=[3000, 3000, 12_000], help="of hbm, dram and sram")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0, help="of both campaigns")
    parser.add_argument(
        "--parity-only", action="store_true", help="compare campaigns with and without parity, without simulation"
    )
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.workload == "transformer":
        model, batches = transformer(asked.samples)
    else:
        loaded = load(
            "cifar-resnet32", {"eval": str(asked.samples), "batch": "1"}, data=asked.data, weights=asked.weights
        )
        model, batches = loaded.model(), list(loaded.batches())
    made = unsilent.Workload(
        model, batches, judge=deviates, name=asked.workload, components={"blocks": ("layer*", "blocks.*")}
    )
    campaign, protected = (
        measured(made, description(model, parity), asked.trials, asked.seed) for parity in (False, True)
    )
    rows = {row.name: row for row in campaign.memory_fit}
    if not asked.parity_only:
        simulated = simulate(model, batches, dict(zip(RATES, asked.events, strict=True)))
        print("memory  campaign FIT  simulated FIT  difference / simulated")
        for memory in RATES:
            show(memory, rows[memory].incorrect, simulated[memory])
    # Parity reports the single flips; the double ones are missed, so that what they make of the calls is left.
    (left,) = (row for row in protected.memory_fit if row.name == "sram")
    print(f"parity in the SRAM: {left.detected:.4g} of {left.raw:.4g} FIT of events are reported")
    show("sram", left.incorrect, rows["sram/p1"].incorrect)


def measured(workload: unsilent.Workload, text: str, trials: int, seed: int) -> Any:
    """A campaign with this description."""
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "three.toml"
        path.write_text(text)
        result = unsilent.pvf(
            workload, accelerator=str(path), store=Path(folder) / "s.sqlite", trials=trials, seed=seed
        )
    print(f"campaign: {result.trials_done} trials, {time.perf_counter() - begun:.0f} s")
    return result


def show(memory: str, ours: Interval, theirs: Interval) -> None:
    """Both rates of a memory, and their difference."""
    gap = difference(ours, theirs)
    print(
        f"{memory:6}  {ours.estimate:.4g} [{ours.low:.4g}, {ours.high:.4g}]  "
        f"{theirs.estimate:.4g} [{theirs.low:.4g}, {theirs.high:.4g}]  "
        f"{100 * gap.estimate / theirs.estimate:+.1f} % "
        f"[{100 * gap.low / theirs.estimate:+.1f}, {100 * gap.high / theirs.estimate:+.1f}]"
    )


if __name__ == "__main__":
    main()
