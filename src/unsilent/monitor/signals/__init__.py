"""Signals of a training: gradients, values inside the model, updates, loss, and fingerprints of bits."""
