"""The report of parameter vulnerability, and of two such campaigns compared."""
