"""``unsilent plan``: which parameters to protect with a given budget, and what failure rate remains."""
