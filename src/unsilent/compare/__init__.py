"""Do two models that should agree answer alike."""
