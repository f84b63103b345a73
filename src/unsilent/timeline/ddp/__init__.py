"""Predicts steps of DistributedDataParallel under other buckets and precisions, from its recorded traces."""
