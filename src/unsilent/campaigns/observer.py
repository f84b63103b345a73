"""Observers, which are notified of what a campaign does while it runs."""

from __future__ import annotations

from unsilent.campaigns.spec import CampaignRow, TrialId


class Observer:
    """Told what goes on. Here every method does nothing; subclasses replace those that matter to them."""

    def loading(self, description: str, done: float, total: float) -> None:
        """A workload is being prepared (trained)."""

    def planned(self, done: int, total: int) -> None:
        """How many trials are stored, and how many there will be."""

    def say(self, sentence: str) -> None:
        """Something worth knowing before it goes on."""

    def trial(self, row: CampaignRow) -> None:
        """A trial ended."""

    def worker_lost(self, trial: TrialId, why: str) -> None:
        """The worker of a trial died, was killed for passing the deadline, or can run no other; ``why`` says what is done."""
