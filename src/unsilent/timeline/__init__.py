"""Replays a distributed training job from its traces: where its time went, which rank held it back, and what if.

A satellite: it imports nothing of faults, campaigns or monitors. Readers of traces make a `unsilent.timeline.job.Job`; all else
(clocks, dependencies, replay, diagnosis, what-if) works on its arrays.
"""
