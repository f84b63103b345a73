"""Rules on what layers compute for one input: pure functions of arrays, one module for each."""
