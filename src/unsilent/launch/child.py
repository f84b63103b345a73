"""``python -m unsilent.launch.child PARENT MODULE …``: runs a module that ends when the process PARENT ends.

torchrun gives each rank a session of its own, so that a kill of torchrun would leave them running: a rank ends with its torchrun.
"""

from __future__ import annotations

import os
import runpy
import sys

from unsilent.basics.child_processes import exit_with_parent
from unsilent.events.host import SLOT

PARENT, SLOTS, RESUME_FROM = "UNSILENT_PARENT", "UNSILENT_SLOTS", "UNSILENT_RESUME_FROM"
"""Variables of the ranks: torchrun's process; the slots of all ranks; the checkpoint to begin with."""

ENDS_OF_TORCHRUN = ("ChildFailedError", "SignalException")
"""Errors with which torchrun ends after a rank has said how it ended, or after a signal."""


def enter_rank() -> None:
    """Make a rank of an isolated job end with torchrun, and set the environment variable with the slot."""
    parent = os.environ.pop(PARENT, "")  # not for what the script starts
    if parent.isdecimal():
        exit_with_parent(int(parent))
        os.environ[SLOT] = os.environ[SLOTS].split(",")[int(os.environ["LOCAL_RANK"])]


def main() -> None:
    """Run the module with the further arguments."""
    parent, module = sys.argv[1:3]
    exit_with_parent(int(parent))
    os.environ[PARENT] = str(os.getpid())
    sys.argv = [module, *sys.argv[3:]]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except Exception as error:
        if type(error).__name__ not in ENDS_OF_TORCHRUN:
            raise
        sys.exit(1)


if __name__ == "__main__":
    main()
