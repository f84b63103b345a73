"""Signals of a running training: gradients, values inside the model, updates, loss, fingerprints of bits."""
