"""Checkpoint formats, one module each: ``matches`` recognises a format, ``tensors`` lists the content."""
