"""Faults inside one training step: forward and backward operations, saved activations, updates and collectives."""
