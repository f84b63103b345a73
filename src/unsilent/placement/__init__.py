"""Placements of parallelism axes on a hierarchical machine, and reduction programs: synthesised, costed, executed."""
