"""The verbs of ``unsilent checkpoint``, without its study."""
