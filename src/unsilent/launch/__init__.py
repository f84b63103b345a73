"""Runs a user's script unchanged, with a monitor on the model that it trains."""
