"""Replays a distributed training from its traces, to explain slow steps and predict changes.

This package imports nothing of faults, campaigns or monitors. Readers of traces make a `unsilent.timeline.job.Job`; everything
else (clocks, dependencies, replay, diagnosis, what-if) works on its arrays.
"""
