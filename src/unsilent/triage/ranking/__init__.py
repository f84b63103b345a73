"""A learned order of queries: features of an incident and of candidates, and what is fitted to graded queries."""
