"""Queries: a function for each template, which answers it, and a row in `table`."""
