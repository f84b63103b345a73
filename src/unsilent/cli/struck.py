"""What ``unsilent training --example`` prints."""

from unsilent.cli.replay import show_replay as tell_example

__all__ = ["tell_example"]
