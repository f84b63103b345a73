"""A collection of incidents with a planted cause, on which queries are executed and graded."""
