"""Predicts steps of DistributedDataParallel with other buckets and precisions, from recorded traces."""
