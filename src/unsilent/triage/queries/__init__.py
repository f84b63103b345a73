"""Queries: a module for each template, whose function answers it, and a row in `table`."""
