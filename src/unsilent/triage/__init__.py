"""The debugging query to run next on an incident: queries, an ordered runbook, and a search that executes them."""
