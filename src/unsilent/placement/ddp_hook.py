"""A communication hook for DistributedDataParallel that reduces gradients with a reduction program."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import GradBucket, get_world_size  # type: ignore[attr-defined]
from torch.futures import Future

from unsilent.placement.execution import ProgramRunner
from unsilent.placement.programs import Program


def program_hook(program: Program, verify: bool = False) -> Callable[[object, GradBucket], Future[Tensor]]:
    """Create a hook for ``model.register_comm_hook(None, hook)`` that reduces gradients with a program.

    Every rank must create it.

    Gradients are averaged over all ranks as in DDP without a hook: divided first, then summed. The steps of a program follow one
    another, so one bucket is reduced before the next one begins.

    Args:
        program: An all-reduce program over as many devices as the job has ranks.
        verify: Whether to compare every reduced bucket with the result of `torch.distributed.all_reduce`.

    Raises:
        UsageError: The program is not an all-reduce, or is for another number of ranks.
    """
    runner = ProgramRunner(program)
    ranks = get_world_size()

    def reduce_bucket(_state: object, bucket: GradBucket) -> Future[Tensor]:
        gradients = bucket.buffer().div_(ranks)
        runner.run(gradients, verify)
        reduced: Future[Tensor] = Future(devices=[gradients.device] if gradients.is_cuda else None)
        reduced.set_result(gradients)
        return reduced

    # torch inspects the annotations of a hook and wants the classes themselves.
    reduce_bucket.__annotations__ = {"bucket": GradBucket, "return": torch.futures.Future[Tensor]}
    return reduce_bucket
