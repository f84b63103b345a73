"""What a monitor reads of a training while it runs: gradients, values inside the model, updates, loss, fingerprints of bits."""
