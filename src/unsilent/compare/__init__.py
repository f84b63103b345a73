"""Two models that should agree: an original, and what was adapted, deployed or corrupted of it."""
