"""What is done after an alarm."""

from unsilent.recovery.ring import Ring

__all__ = ["Ring"]
