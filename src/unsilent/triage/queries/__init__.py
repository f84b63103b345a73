"""Queries on incidents: a function that answers each template, and a row for each in `table`."""
