"""The PVF study: how often a corrupted parameter, or value of a run, makes an output incorrect."""

from __future__ import annotations
