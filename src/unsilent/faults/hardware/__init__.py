"""Faults of accelerators: published fault models, which outputs see a corrupted register, descriptions. Pure numpy."""

SHIPPED = ("nvdla", "systolic", "tensor-core")
"""Descriptions of accelerators that come with the package."""
