"""Rules on the activations of layers for one input: pure functions of arrays, one module each."""
