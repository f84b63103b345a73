"""Observers, which are notified of the progress of a campaign."""

from __future__ import annotations

from unsilent.campaigns.spec import CampaignRow, TrialId


class Observer:
    """A base class of observers.

    Every method does nothing here; subclasses override those that they need.
    """

    def loading(self, description: str, done: float, total: float) -> None:
        """Called while a workload is being prepared (trained)."""

    def planned(self, done: int, total: int) -> None:
        """Called with the number of trials already stored, and the number planned in total."""

    def say(self, sentence: str) -> None:
        """Called with a sentence that the user should read while the campaign runs."""

    def trial(self, row: CampaignRow) -> None:
        """Called when a trial has ended."""

    def worker_lost(self, trial: TrialId, why: str) -> None:
        """Called when a worker died, was killed at its deadline or became unusable.

        ``why`` is the reason and the reaction to it.
        """
