"""Parts of a report, independent of its output: tables, figures, and texts of numbers and names."""
