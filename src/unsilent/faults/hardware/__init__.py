"""Faults of accelerators: published fault models, affected outputs of a corrupted register, descriptions."""

SHIPPED = ("nvdla", "systolic", "tensor-core", "tpu-v4", "h100-pcie", "inferentia2")
"""Names of the accelerator descriptions in the package: three with flip-flops, three with memories."""
