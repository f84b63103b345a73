"""A learned order of queries, fitted to graded queries on features of incidents and candidates."""
