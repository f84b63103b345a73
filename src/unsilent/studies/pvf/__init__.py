"""Parameter vulnerability, and P(incorrect) of transient faults: campaigns over one model's evaluation."""

from __future__ import annotations
