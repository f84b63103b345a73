"""Runs a script of the user's, unchanged, with a monitor on whatever it trains."""
