"""Faults inside one training step: forward and backward operations, what is kept between them, updates and collectives."""
