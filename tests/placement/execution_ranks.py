"""What `test_execution` runs: scenes in processes forked from this one, which meet over gloo; their answers as JSON."""

from __future__ import annotations

import importlib
import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from unsilent.basics.errors import UnsilentError
from unsilent.placement import execution
from unsilent.placement.ddp_hook import program_hook
from unsilent.placement.execution import ProcessGroups, ProgramRunner
from unsilent.placement.programs import Program, Step
from unsilent.placement.synthesis import synthesise

BEST = Program(
    4,
    (
        Step("reduce-scatter", ((0, 1), (2, 3))),
        Step("all-reduce", ((0, 2), (1, 3))),
        Step("all-gather", ((0, 1), (2, 3))),
    ),
)
ROOTED = Program(
    4,
    (
        Step("reduce", ((1, 0), (3, 2))),
        Step("all-reduce", ((3, 1),)),
        Step("broadcast", ((1, 0), (3, 2))),
    ),
)
SHUFFLED = Program(
    4,
    (
        Step("reduce-scatter", ((2, 0), (1, 3))),
        Step("reduce-scatter", ((1, 2), (3, 0))),
        Step("all-gather", ((2, 1), (0, 3))),
        Step("all-gather", ((0, 2), (3, 1))),
    ),
)


def payloads(rank, dtype, count):
    """What a rank brings: of widely different magnitudes where it is floating-point."""
    generator = torch.Generator().manual_seed(rank)
    if not dtype.is_floating_point:
        return torch.randint(-(2**40), 2**40, (count,), generator=generator, dtype=dtype)
    spread = torch.randint(-8, 8, (count,), generator=generator)
    return (torch.randn(count, generator=generator, dtype=torch.float64) * 2.0**spread).to(dtype)


def wrong_elements(got, dtype):
    """How many differ from the sum of what all ranks brought, computed here without a collective."""
    everyone = torch.stack([payloads(rank, dtype, got.numel()) for rank in range(dist.get_world_size())])
    if not dtype.is_floating_point:
        return int((got != everyone.sum(0)).sum())
    exact, size = everyone.double().sum(0), everyone.double().abs().sum(0)
    unit = torch.finfo(dtype).eps / 2
    steps = len(everyone) - 1
    return int(((got.double() - exact).abs() > size * steps * unit / (1 - steps * unit)).sum())


def every_program(*factors):
    """All programs of a hierarchy: integers (37 of them, padded) and floating-point numbers (120)."""
    groups, programs, wrong, unlike = ProcessGroups(), list(synthesise(factors)), [], []
    reference = payloads(dist.get_rank(), torch.int64, 37)
    dist.all_reduce(reference)
    for number, program in enumerate(programs):
        runner = ProgramRunner(program, groups=groups)
        integers = runner.run(payloads(dist.get_rank(), torch.int64, 37))
        floats = runner.run(payloads(dist.get_rank(), torch.float32, 120))
        if wrong_elements(integers, torch.int64) or wrong_elements(floats, torch.float32):
            wrong.append(str(program))
        if not integers.equal(reference):
            unlike.append(number)
    return {"programs": len(programs), "wrong": wrong, "unlike all_reduce": unlike}


def goals(*factors):
    """Every all-gather and reduce-scatter program, verified chunk by chunk."""
    groups, counts, owners = ProcessGroups(), {}, []
    rank, world = dist.get_rank(), dist.get_world_size()
    everyone = [payloads(r, torch.int64, 5 * world) for r in range(world)]
    for goal in ("all-gather", "reduce-scatter"):
        programs = list(synthesise(factors, goal))
        counts[goal] = len(programs)
        for program in programs:
            runner = ProgramRunner(program, goal, groups=groups)
            got = runner.run(everyone[rank].clone(), verify=True).view(world, 5)
            if goal == "all-gather":
                assert got.equal(torch.stack([everyone[r].view(world, 5)[r] for r in range(world)]))
            else:
                (chunk,) = runner.chunks
                assert got[chunk].equal(sum(everyone).view(world, 5)[chunk])
                owners.append(chunk)
    return {"counts": counts, "owners": owners}


def shapes():
    """Payloads of odd sizes, layouts and types, through programs whose groups are not in the order of ranks."""
    wrong = {}
    for name, program in {"best": BEST, "rooted": ROOTED, "shuffled": SHUFFLED}.items():
        runner = ProgramRunner(program)
        for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32):
            for count in (1, 7, 8, 33):
                own = payloads(dist.get_rank(), torch.int64 if dtype == torch.int32 else dtype, count)
                got = runner.run((own % 1000).to(dtype) if dtype == torch.int32 else own, verify=True)
                wrong[f"{name} {dtype} {count}"] = 0 if dtype == torch.int32 else wrong_elements(got, dtype)
        matrix = payloads(dist.get_rank(), torch.float32, 24).view(4, 6).t()
        address = matrix.data_ptr()
        got = runner.run(matrix, verify=True)
        wrong[f"{name} transposed"] = wrong_elements(matrix.t().reshape(-1), torch.float32)
        assert got is matrix
        assert matrix.data_ptr() == address
        assert runner.run(torch.empty(0)).numel() == 0
        parameter = torch.nn.Parameter(torch.ones(5))
        runner.run(parameter)
        assert parameter.tolist() == [4] * 5
    return wrong


def together():
    """Two reductions at the same time, each over two of four ranks."""
    program = Program(2, (Step("reduce-scatter", ((0, 1),)), Step("all-gather", ((0, 1),))))
    runner = ProgramRunner(program, members=[[0, 2], [3, 1]])
    return runner.run(torch.tensor([2 ** dist.get_rank(), 10 * dist.get_rank(), 1]), verify=True).tolist()


def refused():
    """What must not be run."""
    messages = []
    double = Program(4, (Step("all-reduce", ((0, 1), (2, 3))), Step("all-reduce", ((0, 1, 2, 3),))))
    short = Program(4, (Step("all-reduce", ((0, 1), (2, 3))),))
    two = Program(2, (Step("all-reduce", ((0, 1),)),))
    for arguments in [
        (double,),
        (short,),
        (two,),
        (two, "all-reduce", [[0, 1], [1, 2]]),
        (two, "all-reduce", [[0, 1, 2]]),
    ]:
        try:
            ProgramRunner(*arguments)
            messages.append("accepted")
        except UnsilentError as error:
            messages.append(f"{type(error).__name__}: {error}")
    runner = ProgramRunner(BEST)
    for payload in (torch.ones(4, dtype=torch.complex64), torch.ones(4, dtype=torch.bool), torch.eye(4).to_sparse()):
        try:
            runner.run(payload)
            messages.append("accepted")
        except UnsilentError as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


def corrupted():
    """A collective that returns one wrong element in one rank, for integers and for floating-point numbers."""
    messages, runner, correct = [], ProgramRunner(BEST), execution._all_gather

    def gather(output, *rest, **options):
        correct(output, *rest, **options)
        if dist.get_rank() == 2:
            output.view(-1)[3] += 1

    for dtype in (torch.int64, torch.float32):
        payload = payloads(dist.get_rank(), dtype, 40)
        execution._all_gather = gather
        try:
            runner.run(payload, verify=True)
            messages.append("accepted")
        except UnsilentError as error:
            messages.append(f"{type(error).__name__}: {error}")
        execution._all_gather = correct
    return messages


def losses(hook=None, dtype=torch.float64, steps=10):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 9), nn.Tanh(), nn.Linear(9, 3)).to(dtype)
    model = DistributedDataParallel(model, bucket_cap_mb=0.001)
    if hook is not None:
        model.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)  # unlike Adam, sees the scale of gradients
    generator = torch.Generator().manual_seed(dist.get_rank())
    curve = []
    for _ in range(steps):
        x = torch.randn(5, 6, generator=generator, dtype=dtype)
        loss = (model(x) - x[:, :3].sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        curve.append(float(loss))
    return curve


def ddp():
    """Loss curves: of DDP alone, of programs, and of a program whose gradients are twice too large."""

    right = program_hook(BEST)

    def doubled(state, bucket):
        bucket.buffer().mul_(2)
        return right(state, bucket)

    doubled.__annotations__ = right.__annotations__
    curves = {"plain": losses()}
    for name, program in {"best": BEST, "rooted": ROOTED, "shuffled": SHUFFLED}.items():
        curves[name] = losses(program_hook(program, verify=name == "best"))
    curves["doubled"] = losses(doubled)
    curves |= {"plain single": losses(dtype=torch.float32), "best single": losses(right, torch.float32)}
    return curves


SCENES = {f.__name__: f for f in (every_program, goals, shapes, together, refused, corrupted, ddp)}


def rank_main(rank: int, world: int, folder: Path, orders: list) -> None:
    torch.set_num_threads(1)
    meeting = f"file://{folder / 'meeting'}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world, timeout=timedelta(seconds=120))
    answers = {}
    for name, scene, arguments, options in orders:
        answers[name] = SCENES[scene](*arguments, **options)
    (folder / f"{rank}.json").write_text(json.dumps(answers))
    dist.barrier()
    os._exit(0)  # threads of gloo now and then end the process with an abort when it is torn down in order


def main(world: str, folder: str, orders: str) -> int:
    """Forks the ranks, which saves each of them the imports; 0 if all of them end well."""
    importlib.import_module("torch._dynamo")  # else the first step of an optimizer imports it, in each rank
    children = []
    for rank in range(int(world)):
        child = os.fork()
        if child == 0:
            try:
                rank_main(rank, int(world), Path(folder), json.loads(orders))
            finally:
                sys.excepthook(*sys.exc_info())
                os._exit(1)
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
