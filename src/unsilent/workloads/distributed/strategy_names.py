"""The names of all strategies and a check whether one can run here.

The module imports little, because the help of the command line lists the names.
"""

from __future__ import annotations

import importlib.util

from unsilent.basics.errors import UsageError, unknown_name_error

_HERE = "unsilent.workloads.distributed."
STRATEGIES = {
    "single": _HERE + "strategies:Strategy",
    "ddp": _HERE + "strategies:Ddp",
    "fsdp2": _HERE + "fully_sharded:Fsdp2",
    "horovod": _HERE + "horovod_strategy:Horovod",
    "zero1": _HERE + "deepspeed_strategy:Zero1",
}
"""Strategies by name, ``module:class``; some need packages that may be missing."""
PACKAGES = {"horovod": "horovod", "zero1": "deepspeed"}
"""Packages that a strategy needs besides torch."""
STRATEGIES_PAGE = "docs/concepts/checkpoints.md#distributed-strategies"


def check_strategy(name: str, ranks: int) -> None:
    """Raise ``UsageError`` unless the strategy is known and can run here on ``ranks`` ranks."""
    if name not in STRATEGIES:
        raise unknown_name_error("strategy", name, STRATEGIES)
    package = PACKAGES.get(name)
    if package is not None and importlib.util.find_spec(package) is None:
        raise UsageError(
            f"strategy {name!r}: {package} is not installed; take 'ddp', or install it as {STRATEGIES_PAGE} says"
        )
    if ranks < 1 or (name == "single" and ranks != 1):
        expected = "1" if name == "single" else "1 or more"
        raise UsageError(f"strategy {name!r} has {ranks} ranks; expected {expected}: set another world_size")
