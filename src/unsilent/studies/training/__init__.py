"""The training study: outcome classes of faulty runs, values that precede harm, training PVF, and faults undone by the guard."""

from __future__ import annotations
