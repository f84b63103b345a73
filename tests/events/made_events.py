"""Events of a job that never ran: what sinks, the reader, `unsilent watch` and the report of a run are tried on."""

from __future__ import annotations

import math

from unsilent.events.event_kinds import (
    Alarm,
    AlarmExplained,
    Ended,
    IncidentBegan,
    MonitorFailed,
    SamplingChanged,
    Started,
    StepSummary,
    Verdict,
)

BEGAN = 1_790_000_000.0


def started(rank=0, world_size=1, **more):
    fields = {
        "time": BEGAN, "rank": rank, "step": 0, "host": "node-7", "device": f"cuda:{rank}", "process": 4000 + rank,
        "world_size": world_size, "settings": {"preset": "robust-z", "rules": ("robust-z",), "budget": 0.5, "record": None},
        "series": {"gradient": 78, "loss": 1}, "versions": {"unsilent": "0.1.0", "torch": "2.13.0"},
    }  # fmt: skip
    return Started(**{**fields, **more})


def summary(step, rank=0, **more):
    fields = {
        "time": BEGAN + 0.2 * step, "rank": rank, "step": step,
        "loss": 2 + 4 * math.exp(-step / 2000) + 0.03 * math.sin(step + rank),
        "gradient_norm": 0.8 + 0.1 * math.sin(step / 30 + rank), "score": 0.2 + 0.1 * math.sin(step), "cost": 0.0042,
        "health": "ok",
    }  # fmt: skip
    return StepSummary(**{**fields, **more})


def alarm(step, rank=0, **more):
    fields = {
        "time": BEGAN + 0.2 * step, "rank": rank, "step": step, "host": "node-7", "device": f"cuda:{rank}", "rule": "robust-z",
        "feature": "gradient", "tensor": "model.layers.3.mlp.down_proj.weight", "statistic": "max", "level": "alarm",
        "value": 3.1e8, "baseline": 0.021, "score": 41.5,
    }  # fmt: skip
    return Alarm(**{**fields, **more})


def replicas_alarm(step, rank=0, ranks=(0, 1), of=2, **more):
    """Parameters that differ between ranks."""
    fields = {
        "rule": "replicas", "feature": "replicas", "tensor": "", "statistic": "bits", "value": 2.0, "baseline": 1.0,
        "score": math.inf, "ranks": ranks, "series_flagged": len(ranks), "series_judged": of,
    }  # fmt: skip
    return alarm(step, rank, **{**fields, **more})


def verdict(step, rank=0, **more):
    fields = {
        "time": BEGAN + 0.2 * step, "rank": rank, "step": step, "suspect": 1, "reason": "vote", "action": "rerun",
        "outcome": "the last 2 steps were executed again, and differed", "host": "node-7", "device": "cuda:1",
        "tensor": "model.layers.3.mlp.down_proj.weight", "ranks": (1,),
    }  # fmt: skip
    return Verdict(**{**fields, **more})


def incident(step, rank=0, **more):
    fields = {
        "folder": f"runs/incidents/{step}-0a1b2c3d",
        "suspect": 1,
        "tensor": "fingerprint of fc.weight",
        "reason": "fingerprint",
    }
    return IncidentBegan(time=BEGAN + 0.2 * step, rank=rank, step=step, **{**fields, **more})


def explained(step, rank=0, **more):
    fields = {
        "fault": "transient", "suspect": 1, "host": "node-7", "device": "cuda:1", "code": "UNSILENT-T01", "level": "minor",
        "action": "go on", "reason": "5 clean replays (p < 0.6)", "exit_code": 0,
    }  # fmt: skip
    return AlarmExplained(time=BEGAN + 0.2 * step, rank=rank, step=step, **{**fields, **more})


def sampling(step, rank=0, **more):
    fields = {"interval": 4, "reason": "0.61 % of a step, budget 0.5 %"}
    return SamplingChanged(time=BEGAN + 0.2 * step, rank=rank, step=step, **{**fields, **more})


def failed(step, rank=0):
    return MonitorFailed(time=BEGAN + 0.2 * step, rank=rank, step=step, error="ZeroDivisionError: division by zero")


def ended(steps, rank=0, **more):
    fields = {"steps": steps, "alarms": 0, "seconds": 0.2 * steps, "cost": 0.0043, "longest_wait": 4, "unseen": ()}
    return Ended(time=BEGAN + 0.2 * steps, rank=rank, step=steps, **{**fields, **more})


def job(steps=12_000, ranks=2, every=10, alarms=((4000, 1), (4001, 1), (9005, 1))):
    """Events by rank: a job whose rank 1 has a few faults; after the first one its device is in warning."""
    result = {}
    for rank in range(ranks):
        own = [step for step, faulty in alarms if faulty == rank]
        events = [started(rank, ranks), sampling(40, rank)]
        for step in range(0, steps, every):
            health = "warning" if own and step > own[0] else "ok"
            score = 41.5 if any(step - every < at <= step for at in own) else summary(step, rank).score
            events.append(summary(step, rank, health=health, score=score))
        events += [alarm(step, rank) for step in own]
        events += [verdict(step + 1, rank) for step, _ in alarms[:1]]
        events = sorted(events, key=lambda one: one.time)
        result[rank] = [*events, ended(steps, rank, alarms=len(own))]
    return result
