"""Faults of accelerators: published fault models, which outputs see a struck register, descriptions. Pure numpy."""
