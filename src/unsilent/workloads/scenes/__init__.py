"""Scenes of several handwritten digits, and models that label their pixels or find the digits."""
