"""Output of reports: tables in the terminal, self-contained HTML files, and JSON objects."""
