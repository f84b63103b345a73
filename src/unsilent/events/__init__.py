"""Events of a watch of a running job: files of them, what they say of a run, and where they go. Needs no torch."""
