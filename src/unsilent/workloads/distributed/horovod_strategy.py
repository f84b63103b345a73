"""The strategy `horovod`: every rank holds the whole model, and Horovod averages the gradients.

A script with Horovod loads its checkpoint, broadcasts rank 0's parameters and buffers once, and gives its optimizer to
``hvd.DistributedOptimizer``: during a backward pass this starts an allreduce of each gradient, and before the update it waits
for all of them. This strategy does the same, but waits at the end of the backward pass, before gradients are unscaled
and clipped. The optimizers of the training do the update, so they have the same names and state as under any other
strategy.

Ranks are processes of a gang, not of ``horovodrun``. They find each other like the ranks of ``horovodrun``, through a
small HTTP server. Rank 0 runs the server, on the loopback interface alone, until all ranks are connected.

Horovod reduces together whatever gradients are ready at the same time, so that with three ranks or more rounding would depend
on time. This fusion is therefore switched off.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import distributed, nn

from unsilent.basics.errors import UsageError
from unsilent.sites.modules import named_parameters
from unsilent.workloads.distributed.strategies import Strategy
from unsilent.workloads.distributed.strategy_names import STRATEGIES_PAGE
from unsilent.workloads.trainings import TrainingState

LOOPBACK = "127.0.0.1"


class Horovod(Strategy):
    """The strategy that uses ``horovod.torch`` with gloo.

    Raises:
        UsageError: the installed Horovod was built without PyTorch or gloo.
    """

    def __init__(self, ranks: int) -> None:
        try:
            import horovod.torch as hvd
        except ImportError as error:  # the compiled part is missing
            raise UsageError(f"strategy 'horovod': {error}; build it as {STRATEGIES_PAGE} says") from error
        if not hvd.gloo_built():
            raise UsageError(f"strategy 'horovod': horovod was built without gloo; build it as {STRATEGIES_PAGE} says")
        with _meeting_place(ranks) as environment:
            os.environ.update(environment)
            hvd.init()
        self._hvd: Any = hvd
        self._reducers = WeakKeyDictionary[nn.Module, Any]()

    def wrap(self, model: nn.Module) -> nn.Module:
        self._hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        # This optimizer is never stepped: it only reduces gradients, and the optimizers of the training update.
        reducer = self._hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.0), named_parameters=named_parameters(model)
        )

        self._reducers[model] = reducer

        def wait_at_end_of_backward(*_: Any) -> None:
            # Like DistributedDataParallel and fully_shard.
            torch.autograd.Variable._execution_engine.queue_callback(reducer.synchronize)

        torch.autograd.graph.register_multi_grad_hook(trained, wait_at_end_of_backward, mode="any")
        return model

    def release(self, state: TrainingState) -> None:
        self._reducers[state.model]._grad_accs.clear()  # the nodes with its hooks

    def sent_from_rank_0(self, value: Any) -> Any:
        return self._hvd.broadcast_object(value, root_rank=0)


@contextmanager
def _meeting_place(ranks: int) -> Iterator[dict[str, str]]:
    """The environment variables of this rank, as ``horovodrun --gloo`` would set them.

    Inside the context, rank 0 runs the server through which the ranks find each other. The server of ``horovodrun``
    listens on all interfaces; this one is made from the same classes for the loopback interface.
    """
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    number = distributed.get_rank()
    slots = get_host_assignments(parse_hosts(f"localhost:{ranks}"), ranks)
    server = RendezvousHTTPServer((LOOPBACK, 0), RendezvousHandler, False) if number == 0 else None
    if server is not None:
        server.init(slots)
        Thread(target=server.serve_forever, daemon=True).start()
    ports = [server.server_port if server is not None else None]
    distributed.broadcast_object_list(ports, src=0)
    interfaces = [os.environ["GLOO_SOCKET_IFNAME"]]
    variables = {**create_slot_env_vars(slots[number]), **create_run_env_vars(LOOPBACK, interfaces, ports[0])}
    # A lost rank is reported by the gang.
    settings = {**variables, "HOROVOD_FUSION_THRESHOLD": 0, "HOROVOD_LOG_LEVEL": "fatal"}
    yield {name: str(value) for name, value in settings.items()}
    distributed.barrier()
    if server is not None:
        server.shutdown()
        server.server_close()
