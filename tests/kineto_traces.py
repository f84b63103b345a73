"""Traces as the profiler writes them, made by hand."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

DATA = Path(__file__).parent / "timeline" / "data"
STORED = tuple(DATA / f"ddp-rank{rank}of2.json.gz" for rank in (0, 1))
"""Three steps of a model of three linear layers and a batch norm under DDP over gloo, with an all-reduce after each step."""
BASE = 1_790_000_000_000_000_000


def event(name, ts, dur, cat="cpu_op", tid=1, pid=1, **args):
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}


def gloo(name, ts, dur, size=16, tid=2, dtype="float"):
    return event(
        f"gloo:{name}", ts, dur, "user_annotation", tid, **{"Input type": [dtype], "Input Dims": [[size // 4]]}
    )


def cpu_step(step, ts, sizes=(16, 64)):
    """A step of 1,000 µs that launches two all-reduces and waits for them."""
    first, second = sizes
    return [
        event(f"ProfilerStep#{step}", ts, 1000, "user_annotation"),
        event("enumerate(DataLoader)#It.__next__", ts + 10, 40, "user_annotation"),
        event("aten::stack", ts + 20, 20),
        event("DistributedDataParallel.forward", ts + 60, 140, "user_annotation"),
        event("aten::linear", ts + 70, 100),
        event("aten::addmm", ts + 80, 50),
        event("autograd::engine::evaluate_function: AddmmBackward0", ts + 210, 90),
        event("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", ts + 310, 60),
        event(
            "torch::autograd::AccumulateGrad", ts + 320, 10, **{"Input type": ["float"], "Input Dims": [[first // 4]]}
        ),
        event("c10d::allreduce_", ts + 340, 20),
        event("c10d::allreduce_", ts + 380, 20),
        gloo("all_reduce", ts + 370, 230, first),
        gloo("all_reduce", ts + 410, 290, second, tid=3),
        event("torch.distributed.ddp.reducer::copy_bucket_to_grad", ts + 710, 20),
        event("Optimizer.step#SGD.step", ts + 740, 160, "user_annotation"),
        event("aten::add_", ts + 800, 90),
    ]


MIB = 2**20


def all_reduce_time(size):
    """Microseconds that an all-reduce takes in `ddp_step`."""
    return 50 + 1e-4 * size


def ddp_step(step, ts, buckets=((MIB,), (2 * MIB,)), dtype="float", sent=4, seconds=all_reduce_time, before=0, after=0):
    """A step of 1,000 µs under DDP over gloo, with gradients of these bytes by bucket, the k-th ready after 285 + 100 k µs.

    Args:
        dtype: Of gradients.
        sent: Bytes that are sent of each 4 of a gradient.
        seconds: Microseconds of an all-reduce by its bytes.
        before, after: Bytes of a broadcast in the forward pass, and of an all-reduce after the backward pass; 0: none.
    """
    width = {"float": 4, "c10::BFloat16": 2, "c10::Half": 2}

    def tensor(size, kind=dtype):
        return {"Input type": [kind], "Input Dims": [[size // width[kind]]]}

    def reduced(name, start, end, size, kind, tid):
        return event(f"gloo:{name}", start, end - start, "user_annotation", tid, **tensor(size, kind))

    events = [
        event(f"ProfilerStep#{step}", ts, 1000, "user_annotation"),
        event("DistributedDataParallel.forward", ts + 60, 140, "user_annotation"),
        event("aten::linear", ts + 70, 100),
    ]
    if before:
        events += [event("c10d::broadcast_", ts + 65, 4), reduced("broadcast", ts + 66, ts + 69, before, "float", 9)]
    free, gradient = 0.0, 0
    for number, bucket in enumerate(buckets):
        for size in bucket:
            at = ts + 210 + 100 * gradient
            events += [
                event("autograd::engine::evaluate_function: AddmmBackward0", at, 60),
                event("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", at + 62, 30),
                event("torch::autograd::AccumulateGrad", at + 65, 10, **tensor(size)),
            ]
            gradient += 1
        payload = sum(bucket) * sent // 4
        entered = at + 76
        free = max(free, entered) + seconds(payload)
        kind = dtype if sent == 4 else "c10::Half"
        events += [
            event("c10d::allreduce_", at + 75, 10),
            reduced("all_reduce", entered, free, payload, kind, 2 + number % 2),
        ]
    events.append(event("torch.distributed.ddp.reducer::copy_bucket_to_grad", max(free, at + 92) + 5, 10))
    if after:
        events += [event("c10d::allreduce_", ts + 880, 5), reduced("all_reduce", ts + 882, ts + 890, after, "float", 9)]
    events.append(event("Optimizer.step#SGD.step", ts + 900, 90, "user_annotation"))
    return [*events, event("aten::add_", ts + 910, 70)]


def ddp_job_files(folder, steps=6, ranks=2, world_size=None, **options):
    """Traces of a training under DDP; ``options`` of `ddp_step`; ``buckets`` may be a function of the step."""
    folder.mkdir(exist_ok=True)
    per_step = []
    for step in range(steps):
        own = {name: of(step) if name == "buckets" and callable(of) else of for name, of in options.items()}
        per_step += ddp_step(step, 1000 * step, **own)
    for rank in range(ranks):
        write(folder / f"trace{rank}.json", trace(per_step, rank, world_size or ranks))
    return folder


def sharded_step(step, ts, reduced="float"):
    """A step of 1,000 µs under FSDP2 over gloo, which waits for each collective at once, also within an operation.

    ``reduced``: dtype in which gradients are.
    """
    return [
        event(f"ProfilerStep#{step}", ts, 1000, "user_annotation"),
        event("c10d::_allgather_base_", ts + 20, 30),
        gloo("all_gather", ts + 40, 100),
        event("aten::select", ts + 100, 30, tid=2),
        event("aten::addmm", ts + 150, 100),
        event("autograd::engine::evaluate_function: AddmmBackward0", ts + 260, 600),
        event("fsdp::all_gather_copy_in", ts + 265, 10),
        event("c10d::_allgather_base_", ts + 280, 20),
        gloo("all_gather", ts + 290, 160, tid=3),
        event("fsdp::split_with_sizes_copy", ts + 450, 15),
        event("aten::mm", ts + 470, 80),
        event("c10d::_reduce_scatter_base_", ts + 560, 20),
        gloo("all_reduce", ts + 590, 210, 32, dtype=reduced),
        event("aten::copy_", ts + 820, 20),
        event("c10d::allreduce_", ts + 870, 20),
        gloo("all_reduce", ts + 880, 40, tid=3),
        event("aten::add_", ts + 930, 60),
    ]


def gpu_step(step, ts, **collective):
    """A step of 1,000 µs with two kernels, a copy, and an all-reduce on a stream of its own."""
    arguments = {"Collective name": "allreduce", "In msg nelems": 8, "dtype": "BFloat16", "Process Group Name": "0",
                 "Process Group Ranks": "[0, 1]", "Group size": 2} | collective  # fmt: skip
    number = 10 * step
    return [
        event(f"ProfilerStep#{step}", ts, 1000, "user_annotation"),
        event("DistributedDataParallel.forward", ts + 10, 90, "user_annotation"),
        event("aten::linear", ts + 20, 60),
        event("cudaLaunchKernel", ts + 40, 10, "cuda_runtime", correlation=number),
        event("sgemm", ts + 100, 200, "kernel", 7, 0, correlation=number),
        event("autograd::engine::evaluate_function: X", ts + 110, 100, tid=5),
        event("cudaLaunchKernel", ts + 130, 10, "cuda_runtime", tid=5, correlation=number + 1),
        event("sgemm_back", ts + 300, 200, "kernel", 7, 0, correlation=number + 1),
        event("cudaLaunchKernelExC", ts + 160, 10, "cuda_runtime", tid=5, correlation=number + 2),
        event("ncclDevKernel_AllReduce(x)", ts + 500, 300, "kernel", 20, 0, correlation=number + 2, **arguments),
        event("aten::to", ts + 800, 180),
        event("cudaMemcpyAsync", ts + 810, 10, "cuda_runtime", correlation=number + 3),
        event("Memcpy DtoH", ts + 850, 20, "gpu_memcpy", 7, 0, correlation=number + 3),
        event("cudaStreamSynchronize", ts + 830, 60, "cuda_runtime"),
    ]


def trace(events, rank=0, world_size=2, **fields):
    whole = {"distributedInfo": {"backend": "gloo", "rank": rank, "world_size": world_size}, **fields}
    return {**whole, "traceEvents": events, "baseTimeNanoseconds": BASE}


def write(path, content):
    text = json.dumps(content).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def cpu_job(folder, steps=(3, 4), ranks=2):
    """Traces of all ranks; a later rank is 100 µs late."""
    return [
        write(
            folder / f"trace{rank}.json",
            trace(
                [one for at, step in enumerate(steps) for one in cpu_step(step, 1000 * at + 100 * rank)], rank, ranks
            ),
        )
        for rank in range(ranks)
    ]
