"""The commands of ``unsilent timeline``."""
