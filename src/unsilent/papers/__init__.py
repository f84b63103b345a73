"""Reproductions of papers to the letter, which nothing else needs: file formats, networks and logs of published artifacts."""
