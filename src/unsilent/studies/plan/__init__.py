"""The plan study: which parameters to protect within a budget, and what failure rate remains."""
