"""Questions answered with campaigns."""
