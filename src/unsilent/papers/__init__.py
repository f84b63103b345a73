"""Exact reproductions of papers: file formats, networks and logs of published artifacts."""
