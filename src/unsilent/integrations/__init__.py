"""Callbacks for training frameworks; each module needs its framework installed."""
