"""What a watch of a running job reports: events, files of them, what they say of a run, and where they go. Needs no torch."""
