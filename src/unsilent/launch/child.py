"""``python -m unsilent.launch.child PARENT MODULE …``: runs a module that ends when the process PARENT ends.

torchrun gives each rank its own session, so ranks would survive a kill of torchrun. With this module a rank ends with its
torchrun.
"""

from __future__ import annotations

import os
import runpy
import sys

from unsilent.basics.child_processes import exit_with_parent
from unsilent.events.host import SLOT

PARENT, SLOTS, RESUME_FROM = "UNSILENT_PARENT", "UNSILENT_SLOTS", "UNSILENT_RESUME_FROM"
"""Environment variables of the ranks: number of torchrun's process; slots of all ranks; checkpoint to begin with."""

ENDS_OF_TORCHRUN = ("ChildFailedError", "SignalException")
"""Errors with which torchrun ends after a rank has reported its own error, or after a signal."""


def enter_rank() -> None:
    """Make a rank of an isolated job end with torchrun, and set the environment variable with the slot."""
    parent = os.environ.pop(PARENT, "")  # not for processes that the script starts
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
