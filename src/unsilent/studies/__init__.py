"""The studies: questions about silent data corruption that campaigns of trials answer."""
