"""CPU time of the digests that a monitor compares, as a multiple of that of a sum of the same words.

python -m benchmarks.fingerprint_cost
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from unsilent.recovery.digests import digests_of

REPEATS = 51


def model() -> nn.Module:
    """A transformer of about 10 M parameters, with its tensors of all sizes."""
    layer = nn.TransformerEncoderLayer(512, 8, 1024, batch_first=True)
    return nn.TransformerEncoder(layer, 5)


def sums_of(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of the 64-bit words of each tensor."""
    return torch.stack([tensor.detach().view(-1).view(torch.int64).sum() for tensor in tensors])


def cpu_seconds(function: Callable[[], object]) -> float:
    """CPU time of one call."""
    begun = time.process_time()
    function()
    return time.process_time() - begun


def main() -> None:
    """Both in turn, so that whatever else the machine does meets both."""
    torch.set_num_threads(1)
    tensors = list(model().parameters())
    ways = {"sum": lambda: sums_of(tensors), "digest": lambda: digests_of(tensors)}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(REPEATS):
        for name, way in ways.items():
            times[name].append(cpu_seconds(way))
    count = sum(tensor.numel() for tensor in tensors)
    median = {name: statistics.median(seconds) for name, seconds in times.items()}
    print(f"{count:,} parameters in {len(tensors)} tensors, {REPEATS} repeats, medians of CPU time")
    print(
        f"sum {median['sum'] * 1e3:.2f} ms, digest {median['digest'] * 1e3:.2f} ms: {median['digest'] / median['sum']:.2f} times"
    )


if __name__ == "__main__":
    main()
