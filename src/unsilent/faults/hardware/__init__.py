"""Faults of accelerators: published fault models, affected outputs of a corrupted register, descriptions."""

SHIPPED = ("nvdla", "systolic", "tensor-core", "tpu-v4", "h100-pcie", "inferentia2")
"""Descriptions of accelerators that come with the package: three of flip-flops, three of memories."""
