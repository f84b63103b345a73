"""Campaigns of struck trainings: each trial strikes one step of a training and follows it to its end."""

from __future__ import annotations
