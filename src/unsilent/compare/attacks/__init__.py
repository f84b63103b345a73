"""Evasive inputs, which an adapted model gets wrong and its original right: search, scores and defences."""
