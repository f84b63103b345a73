"""Scenes of several handwritten digits on one canvas, and the models that label their pixels or find the digits."""
