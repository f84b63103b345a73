"""Results shown: a table in the terminal, one self-contained HTML file, one JSON object. Reads records only."""
