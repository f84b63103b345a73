"""The noise study: how much fault-free runs of one training differ, and why."""

from __future__ import annotations
