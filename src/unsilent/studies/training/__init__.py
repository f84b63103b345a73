"""The training study: what faults in single steps do to a training."""

from __future__ import annotations
