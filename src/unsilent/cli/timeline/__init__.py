"""The verbs of ``unsilent timeline``."""
