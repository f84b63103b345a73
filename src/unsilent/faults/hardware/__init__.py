"""Faults of accelerators: published fault models, which outputs see a corrupted register, descriptions. Pure numpy."""

SHIPPED = ("nvdla", "systolic", "tensor-core", "tpu-v4", "h100-pcie", "inferentia2")
"""Descriptions of accelerators that come with the package: three of flip-flops, three of memories."""
