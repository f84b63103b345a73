"""Publishes events as metrics for Prometheus, on 127.0.0.1 only. Needs the extra ``prometheus``."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from unsilent.basics.errors import UsageError
from unsilent.events.event_kinds import (
    FINGERPRINT,
    LOGGER,
    REPLICAS,
    Alarm,
    AlarmExplained,
    Ended,
    Event,
    IncidentBegan,
    MonitorFailed,
    SamplingChanged,
    StepSummary,
    Verdict,
)
from unsilent.events.run_history import OK, health_after

LOOPBACK = "127.0.0.1"


class PrometheusSink:
    """Sink that serves metrics at ``/metrics``.

    Args:
        port: Port to serve; 0: any free port. The log names the port.
        rank: A label of every metric.
        rules: Rules whose alarms are counted from 0.

    Raises:
        UsageError: prometheus-client is not installed.
        OSError: The port is taken.

    Attributes:
        port: The port that is served.
    """

    def __init__(self, port: int, rank: int = 0, rules: Sequence[str] = ()) -> None:
        try:
            from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server
        except ImportError:
            raise UsageError(
                "metrics need the package prometheus-client; install it with: pip install 'unsilent[prometheus]'"
            ) from None
        registry = CollectorRegistry()  # not the job's registry

        def gauge(name: str, text: str, value: float = math.nan) -> Gauge:
            result = Gauge(f"unsilent_{name}", text, ["rank"], registry=registry).labels(self._rank)
            result.set(value)
            return result

        self._rank, self._health = str(rank), OK
        self._done = 0
        self._steps = Counter("unsilent_steps", "Steps.", ["rank"], registry=registry).labels(self._rank)
        self._alarms = Counter(
            "unsilent_alarms", "Alarms and warnings of rules.", ["rank", "rule", "level"], registry=registry
        )
        for rule in (*rules, FINGERPRINT, REPLICAS):
            for level in ("alarm", "warning")[: 1 if rule in (FINGERPRINT, REPLICAS) else 2]:
                self._alarms.labels(self._rank, rule, level)
        self._verdicts = Counter(
            "unsilent_verdicts", "Verdicts of all ranks, by what was done.", ["rank", "action"], registry=registry
        )
        self._incident = Gauge(
            "unsilent_incident_step", "Step of the first alarm of the run; suspect -1: undetermined.",
            ["rank", "folder", "suspect", "tensor"], registry=registry,
        )  # fmt: skip
        self._fault = Gauge(
            "unsilent_fault_verdict_step", "Step of the last alarm that was such a fault.",
            ["rank", "fault", "code", "suspect"], registry=registry,
        )  # fmt: skip
        self._warning = gauge("health", "Health of the device: 0 ok, 1 warning.", 0)
        self._running = gauge("monitor_running", "1; 0 after the monitor failed or ended.", 1)
        self._loss = gauge("loss", "Loss of the last step that was reported.")
        self._norm = gauge("gradient_norm", "L2 norm of the gradients that were read, in this rank.")
        self._score = gauge("score", "Largest score of a rule since the last report; 1 is an alarm.")
        self._cost = gauge("cost_ratio", "Share of the time that the monitor takes.")
        self._interval = gauge("sampling_interval_steps", "Steps within which every tensor is read.")
        self._server, self._thread = start_http_server(port, addr=LOOPBACK, registry=registry)
        self.port = int(self._server.server_port)
        logging.getLogger(LOGGER).info("metrics of rank %d: http://%s:%d/metrics", rank, LOOPBACK, self.port)

    def __call__(self, event: Event) -> None:
        self._health = health_after(self._health, event)
        self._warning.set(self._health != OK)
        if isinstance(event, (StepSummary, Alarm, Verdict, Ended)):
            done = event.steps if isinstance(event, Ended) else event.step + 1
            self._steps.inc(max(0, done - self._done))
            self._done = max(done, self._done)
        if isinstance(event, StepSummary):
            for metric, value in ((self._loss, event.loss), (self._norm, event.gradient_norm)):
                if value is not None:
                    metric.set(value)
            self._score.set(math.nan if event.score is None else event.score)
            self._cost.set(event.cost)
        elif isinstance(event, Alarm):
            self._alarms.labels(self._rank, event.rule, event.level).inc()
        elif isinstance(event, Verdict):
            self._verdicts.labels(self._rank, event.action).inc()
        elif isinstance(event, IncidentBegan):
            self._incident.labels(self._rank, event.folder, str(event.suspect), event.tensor).set(event.step)
        elif isinstance(event, AlarmExplained):
            self._fault.labels(self._rank, event.fault, event.code, str(event.suspect)).set(event.step)
        elif isinstance(event, SamplingChanged):
            self._interval.set(event.interval)
        elif isinstance(event, (MonitorFailed, Ended)):
            self._running.set(0)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
