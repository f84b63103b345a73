"""How often a comparison names the right layer and channel of a quantised network with a fault, and none without one.

    python -m benchmarks.compare_suspects [--faults 200] [--clean 200] [--reruns 200] [--seed 0] [--weights F --data F] [--save F]

Networks: an MLP, a small transformer and a network of depthwise convolutions with random weights; `digits-cnn` and
`digits-mobilenet` with trained ones; with --weights and --data, CIFAR ResNet-32. Each is quantised to 8 or 4 bits, per channel or
per tensor, as a fake-quantised copy or with integer products, calibrated on other inputs than it is compared on.

A fault is drawn in this order: the kind (one bit, two channels, a scale or zero point: a third each), the network, how it is
quantised, the layer, and where. Kinds:

- bit: one bit of the code of a weight.
- swap: two output channels exchanged, with their scales.
- weight scale: multiplied or divided by 1.25 to 8, of one channel, or of the layer where that has one scale; codes are kept.
- weight zero point: all codes of the channel or layer shifted by 1 to the largest code, and cut where that ends.
- input scale, input zero point: that of the dequantisation alone, by such a factor or by 1 to 127.
- input range: scale or zero point of quantisation and dequantisation alike, which only moves what is cut and how fine it is.

A fault is masked if no output of the network changes by a single bit; masked faults are counted apart. A named layer is right if
it is the one with the fault, a channel if the fault is in it. Shares have Clopper-Pearson limits of 95 %.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import time

import torch
from torch import nn

from unsilent.compare.adapters.fake_quant import converted, fake_quantised, quantised_layers
from unsilent.compare.layers import compare_layers
from unsilent.statistics import clopper_pearson
from unsilent.workloads import load
from unsilent.workloads.batch_samples import take_samples
from unsilent.workloads.layers import TransformerBlock

SCALES = (
    "weight scale", "weight zero point", "input scale", "input zero point", "input range, scale", "input range, zero point",
)  # fmt: skip
KINDS = ("bit", "swap", *SCALES)
CONFIGURATIONS = [(bits, per_channel) for bits in (8, 4) for per_channel in (True, False)]


class Transformer(nn.Module):
    """Two blocks over 16 vectors."""

    def __init__(self, width=32, classes=10):
        super().__init__()
        self.embed = nn.Linear(12, width)
        self.blocks = nn.Sequential(*(TransformerBlock(width, 4) for _ in range(2)))
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        return self.head(self.blocks(self.embed(x)).mean(1))


def depthwise():
    """Depthwise and pointwise convolutions in turn."""
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU()]
    for width in (16, 16, 16):
        layers += [nn.Conv2d(width, width, 3, padding=1, groups=width), nn.ReLU6()]
        layers += [nn.Conv2d(width, width, 1), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    for layer in layers:  # else most of its channels are 0 for all inputs
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight)
    return model


def networks(options):
    """Name -> (model, inputs for calibration, inputs to compare on), both batches."""
    torch.manual_seed(options.seed)
    mlp = nn.Sequential(
        nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)
    )
    made = {
        "mlp": (mlp, lambda n: torch.randn(n, 20)),
        "transformer": (Transformer(), lambda n: torch.randn(n, 16, 12)),
        "depthwise": (depthwise(), lambda n: torch.randn(n, 3, 12, 12)),
    }
    result = {name: (model.eval(), [draw(64)], [draw(32)]) for name, (model, draw) in made.items()}
    real = {"digits-cnn": {}, "digits-mobilenet": {}}
    if options.weights:
        real["cifar-resnet32"] = {"weights": options.weights, "data": options.data}
    for name, settings in real.items():
        workload = load(name, **settings)
        inputs = torch.cat([batch if torch.is_tensor(batch) else batch[0] for batch in workload.batches()])
        half, number = len(inputs) // 2, 16 if name.startswith("cifar") else 32
        result[name] = (workload.model(), [inputs[half : half + 64]], [inputs[:number]])
    return result


def scaled(step, weight):
    """Steps in the shape of weights."""
    return step.view(-1, *[1] * (weight.ndim - 1))


def plant(twin, kind, rng):
    """Corrupts a fake-quantised copy; returns the layer's name, the channels (empty: all of them) and what was done."""
    quantised = set(quantised_layers(twin))
    name, layer = rng.choice([item for item in twin.named_modules() if item[1] in quantised])
    channel, step, weight = rng.randrange(len(layer.weight)), layer.weight_scale, layer.weight.data
    changed = [channel] if layer.per_channel else list(range(len(weight)))
    codes = (weight / scaled(step, weight)).round().clamp(-layer.largest, layer.largest)
    factor = rng.uniform(1.25, 8) ** rng.choice((1, -1))
    if kind == "bit":
        bits, flat = (2 * layer.largest + 1).bit_length(), codes.view(len(codes), -1)[channel]
        place, bit = rng.randrange(len(flat)), rng.randrange((2 * layer.largest + 1).bit_length())
        code = int(flat[place])
        other = (code % 2**bits) ^ (1 << bit)
        flat[place] = max(other - 2**bits if other >= 2 ** (bits - 1) else other, -layer.largest)
        weight.copy_(codes * scaled(step, weight))
        return name, {channel}, f"bit {bit}, {code} -> {int(flat[place])}"
    if kind == "swap":
        other = rng.choice([c for c in range(len(weight)) if c != channel])
        order = torch.arange(len(weight))
        order[[channel, other]] = order[[other, channel]]
        weight.copy_(weight[order])
        step.copy_(step[order])
        return name, {channel, other}, ""
    if kind == "weight scale":
        step[changed] *= factor
        weight[changed] = (codes * scaled(step, weight))[changed]
        return name, set(changed) if layer.per_channel else set(), f"x {factor:.3g}"
    if kind == "weight zero point":
        shift = rng.choice((1, -1)) * rng.randint(1, layer.largest)
        weight[changed] = (codes * scaled(step, weight) + shift * scaled(step, weight))[changed]
        return name, set(changed) if layer.per_channel else set(), f"{shift:+}"
    zero = int(layer.input_zero)
    shift = rng.choice((1, -1)) * rng.randint(1, 127)
    shift = shift if 0 <= zero + shift <= 255 else -shift
    if kind == "input range, scale":
        layer.input_scale *= factor
    elif kind == "input range, zero point":
        layer.input_zero.fill_(zero + shift)
    else:
        gain, offset = (factor, 0.0) if kind == "input scale" else (1.0, -shift * float(layer.input_scale))
        rounded = layer.quantised_inputs
        layer.quantised_inputs = lambda x: rounded(x) * gain + offset
    return name, set(), f"x {factor:.3g}" if "scale" in kind else f"{zero} {shift:+}"


def drawn_kind(rng):
    return rng.choice(("bit", "swap", rng.choice(SCALES)))


def deployed(model, calibration, configuration):
    bits, per_channel = configuration
    return fake_quantised(model, calibration, bits, per_channel=per_channel)


def one_row(subjects, rng, kind):
    """One planted fault, or a clean pair (kind "none"), or a rerun (kind "rerun")."""
    network = rng.choice(list(subjects))
    model, calibration, batches = subjects[network]
    configuration = rng.choice(CONFIGURATIONS)
    is_integer = rng.random() < 0.5
    # Another part of the inputs for each row: calibration and comparison see other draws.
    some = [torch.tensor(rng.sample(range(len(one[0])), k=len(one[0]) * 3 // 4)) for one in (calibration, batches)]
    calibration, batches = (
        [take_samples(one[0], which)] for one, which in zip((calibration, batches), some, strict=True)
    )
    row = {
        "network": network,
        "bits": configuration[0],
        "per_channel": configuration[1],
        "integer": is_integer,
        "kind": kind,
    }
    if kind == "rerun":
        other = copy.deepcopy(model)
        result = compare_layers(model, other, batches)
        first = result.first_beyond_floor
        return row | {"named": first.name if first else None, "everywhere": result.differs_everywhere}
    twin = deployed(model, calibration, configuration)
    clean = converted(twin) if is_integer else twin
    if kind == "none":
        suspects = compare_layers(model, clean, batches).suspects
        return row | {"named": suspects[0].layer if suspects else None, "why": suspects[0].reason if suspects else ""}
    faulty = copy.deepcopy(twin)
    layer, channels, what = plant(faulty, kind, rng)
    if is_integer and not kind.startswith(("input scale", "input zero")):  # those are faults of the copy's own code
        faulty = converted(faulty)
    else:
        clean = twin
    with torch.no_grad():
        masked = all(torch.equal(clean(batch), faulty(batch)) for batch in batches)
    suspects = compare_layers(model, faulty, batches).suspects
    named = suspects[0] if suspects else None
    return row | {
        "layer": layer, "channels": sorted(channels), "what": what, "masked": masked,
        "named": named and named.layer, "channel": named and named.channel, "why": named.reason if named else "",
        "layer_right": bool(named) and named.layer == layer,
        "channel_right": bool(named) and named.layer == layer and named.channel in channels if channels else None,
    }  # fmt: skip


def share(count, of):
    if not of:
        return "none of 0"
    limits = clopper_pearson(count, of)
    return f"{count} of {of} = {100 * count / of:.1f} % [{100 * limits.low:.1f}, {100 * limits.high:.1f}]"


def summary(rows):
    """Prints the figures."""
    faults = [row for row in rows if row["kind"] in KINDS]
    groups = {"all": faults} | {kind: [row for row in faults if row["kind"] == kind] for kind in KINDS}
    for network in sorted({row["network"] for row in faults}):
        groups[network] = [row for row in faults if row["network"] == network]
    for name, group in groups.items():
        seen = [row for row in group if not row["masked"]]
        local = [row for row in seen if row["channel_right"] is not None]
        print(
            f"{name}: {len(group)} faults, {len(group) - len(seen)} masked; of the others, "
            f"layer right {share(sum(row['layer_right'] for row in seen), len(seen))}, "
            f"channel right {share(sum(row['channel_right'] for row in local), len(local))}"
        )
    for kind in ("none", "rerun"):
        group = [row for row in rows if row["kind"] == kind]
        what = "clean pairs" if kind == "none" else "reruns"
        print(f"{what}: a layer named in {share(sum(row['named'] is not None for row in group), len(group))}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("faults", 200), ("clean", 200), ("reruns", 200), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name in ("weights", "data", "save"):
        parser.add_argument(f"--{name}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    subjects, began, rows = networks(options), time.perf_counter(), []
    kinds = [None] * options.faults + ["none"] * options.clean + ["rerun"] * options.reruns
    for number, kind in enumerate(kinds):
        rng = random.Random(f"{options.seed}/{number}")
        rows.append({"number": number} | one_row(subjects, rng, kind or drawn_kind(rng)))
        if options.save:
            with open(options.save, "a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    summary(rows)
    print(f"seed {options.seed}, {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
