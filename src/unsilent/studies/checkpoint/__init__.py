"""The checkpoint study: effects of a corrupted bit in a checkpoint on the training that resumes from it, by strategy."""
