"""Ranks that were stopped together end together: torchrun ends all others as soon as one has ended."""

from __future__ import annotations

import contextlib
import os
import time

from unsilent.launch.alarm_command import LIMIT_SECONDS

POLL_SECONDS = 0.02
OTHERS_SECONDS = LIMIT_SECONDS + 30
"""Seconds that a stopped rank waits for the others, of which rank 0 may run a command."""
_KEY = "unsilent/stopped"


def wait_for_stopped_ranks() -> None:
    """Under torchrun: wait until all ranks have come here, for at most `OTHERS_SECONDS`.

    So each of them writes its part of an incident to the end, and rank 0 runs ``--on-alarm-exec``.
    """
    import torch.distributed as dist

    if "TORCHELASTIC_RUN_ID" not in os.environ or not (dist.is_available() and dist.is_initialized()):
        return
    deadline = time.monotonic() + OTHERS_SECONDS
    with contextlib.suppress(RuntimeError):  # the store of a rank that has ended
        store = dist.distributed_c10d._get_default_store()
        came = store.add(_KEY, 1)
        while came < dist.get_world_size() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            came = store.add(_KEY, 0)
