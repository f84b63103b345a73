"""The commands of ``unsilent checkpoint``."""
