"""A collection of incidents with planted causes, on which queries are executed and graded."""
