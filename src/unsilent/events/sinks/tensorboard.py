"""Writes events as scalars and text for TensorBoard. Needs the extra ``tensorboard``."""

from __future__ import annotations

import logging
from pathlib import Path

from unsilent.basics.errors import UsageError
from unsilent.basics.printable import escape_unprintable
from unsilent.events.event_kinds import Event, SamplingChanged, StepSummary


class TensorBoardSink:
    """Sink that writes a TensorBoard log.

    Args:
        folder: Folder that only this rank uses.

    Raises:
        UsageError: TensorBoard is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UsageError(
                "logs for TensorBoard need the package tensorboard; install it with: pip install 'unsilent[tensorboard]'"
            ) from None
        self._writer = SummaryWriter(str(folder))

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepSummary):
            for name in ("loss", "gradient_norm", "score", "cost"):
                if (value := getattr(event, name)) is not None:
                    self._scalar(name, value, event)
        elif isinstance(event, SamplingChanged):
            self._scalar("sampling_interval", event.interval, event)
        elif event.log_level >= logging.WARNING:
            self._writer.add_text(f"unsilent/{event.kind}s", escape_unprintable(event), event.step, event.time)
            self._writer.flush()

    def _scalar(self, name: str, value: float, event: Event) -> None:
        self._writer.add_scalar(f"unsilent/{name}", value, event.step, event.time)

    def close(self) -> None:
        self._writer.close()
