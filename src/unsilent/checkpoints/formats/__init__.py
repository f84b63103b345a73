"""Formats of checkpoints, a module each: ``matches`` says whether files are of the format, ``tensors`` lists what they hold."""
