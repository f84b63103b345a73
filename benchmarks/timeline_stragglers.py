"""Whether `unsilent timeline` names the rank and the part of a step that was made slow, and nobody where nothing was.

    python -m benchmarks.timeline_stragglers [--repeats 6]

Gloo ranks on one computer train a network under DDP whose layers compute by sleeping (see `benchmarks.timeline_what_if`). One
rank is delayed in one part of every step: loader, forward, early or late backward pass, optimizer. The noise floor of each world
size is first taken from a recording without a delay; planted delays are eight times as long, then a third of it; then nothing is
planted. A planted delay counts where it is at least three times the noise floor of its own recording; in place of one that does
not, whatever is named, one twice as long is recorded. Printed: how often the first that is named is the right rank and part, and
how often a wrong one is named.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.timeline_what_if import Layer
from unsilent.timeline.kineto import read_traces
from unsilent.timeline.load import job_of_recording
from unsilent.timeline.stragglers import PARTS, excesses

LAYERS, SECONDS, STEPS = 8, 0.002, 20


class Delayed(nn.Module):
    """Layers, of which one sleeps longer in a part of the step."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer(SECONDS) for _ in range(LAYERS))
        self.delays = dict.fromkeys(PARTS, 0.0)

    def forward(self, value):
        for number, layer in enumerate(self.layers):
            place = {LAYERS - 1: "early backward", 1: "late backward"}.get(number)
            if place:
                value = _Backward.apply(value, self.delays[place])
            value = layer(value)
        time.sleep(self.delays["forward"])
        return value


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(context, value, seconds):
        context.seconds = seconds
        return value.view_as(value)

    @staticmethod
    def backward(context, gradient):
        time.sleep(context.seconds)
        return gradient, None


def rank_main(rank, ranks, folder):
    """Record a job for each line of the file of cases, as they come."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    network = Delayed()
    model = DistributedDataParallel(network, bucket_cap_mb=0.25)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer.register_step_post_hook(lambda *_: time.sleep(network.delays["optimizer"]))
    inputs = torch.randn(4, 181, requires_grad=True)

    def step():
        optimizer.zero_grad()
        time.sleep(network.delays["loader"])
        model(inputs).square().mean().backward()
        optimizer.step()

    for _ in range(3):
        step()
    number = 0
    while True:
        case = folder / f"case-{number}.json"
        while not case.exists():
            time.sleep(0.005)
        asked = json.loads(case.read_text())
        if asked is None:
            os._exit(0)
        network.delays = dict.fromkeys(PARTS, 0.0)
        if asked["rank"] == rank:
            network.delays[asked["part"]] = asked["seconds"]
        distributed.barrier()
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True,
            schedule=torch.profiler.schedule(wait=0, warmup=1, active=STEPS, repeat=1),
            on_trace_ready=lambda one, number=number: one.export_chrome_trace(str(folder / f"{number}-rank{rank}.json")),
        ) as profiler:  # fmt: skip
            for _ in range(STEPS + 1):
                step()
                profiler.step()
        (folder / f"done-{number}-{rank}").touch()
        number += 1


class Job:
    """Ranks that record one case after the other."""

    def __init__(self, ranks, folder):
        self.ranks, self._folder, self._number, self._children = ranks, folder, 0, []
        for rank in range(ranks):
            child = os.fork()
            if child == 0:
                try:
                    rank_main(rank, ranks, folder)
                finally:
                    sys.excepthook(*sys.exc_info())
                    os._exit(1)
            self._children.append(child)

    def _ask(self, case):
        draft = self._folder / "draft"
        draft.write_text(json.dumps(case))
        draft.rename(self._folder / f"case-{self._number}.json")

    def record(self, rank=-1, part=PARTS[0], seconds=0.0):
        """What is found in a job with this delay, the clearest first."""
        self._ask({"rank": rank, "part": part, "seconds": seconds})
        while any(not (self._folder / f"done-{self._number}-{one}").exists() for one in range(self.ranks)):
            time.sleep(0.01)
        traces = [self._folder / f"{self._number}-rank{one}.json" for one in range(self.ranks)]
        found = excesses(job_of_recording(read_traces(traces)))
        for one in traces:
            one.unlink()
        self._number += 1
        return found

    def end(self):
        self._ask(None)
        for child in self._children:
            os.waitpid(child, 0)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=6)
    repeats = parser.parse_args().repeats
    counts = {}
    for ranks in (2, 4):
        with tempfile.TemporaryDirectory() as name:
            job = Job(ranks, Path(name))
            clean = job.record()
            floors = {part: max(one.floor for one in clean if one.part == part) for part in PARTS}
            print(
                f"{ranks} ranks, noise floors: {', '.join(f'{part} {1e3 * one:.2f} ms' for part, one in floors.items())}",
                flush=True,
            )
            for repeat in range(repeats):
                for at, part in enumerate(PARTS):
                    rank = (repeat + at) % ranks
                    cases = [("planted", 8 * floors[part]), ("below", floors[part] / 3), ("clean", 0.0)]
                    for kind, seconds in cases:  # grows by a longer delay for one that does not count
                        found = job.record(rank if seconds else -1, part, seconds)
                        first, count = found[0], counts.setdefault((ranks, kind), [0, 0, 0])
                        own = max(one.floor for one in found if one.part == part)
                        if kind == "planted" and seconds < 3 * own:
                            not_counted = f"{1e3 * seconds:.2f} ms in {part}, noise floor {1e3 * own:.2f} ms"
                            print(f"  not counted: {not_counted}", flush=True)
                            cases.append((kind, 2 * seconds))
                            continue
                        right = seconds > 0 and (first.rank, first.part) == (rank, part)
                        count[0] += 1
                        count[1] += right and first.is_separable
                        count[2] += first.is_separable and not right
                        if first.is_separable != (kind == "planted") or (kind == "planted" and not right):
                            print(f"  {kind} {1e3 * seconds:.2f} ms, rank {rank}, {part}: {first}", flush=True)
            job.end()
    for (ranks, kind), (jobs, right, wrong) in counts.items():
        print(f"{ranks} ranks, {kind}: {right} of {jobs} named rightly, {wrong} wrongly")


if __name__ == "__main__":
    main()
