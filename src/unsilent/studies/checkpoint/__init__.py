"""The checkpoint study: how a corrupted bit in a checkpoint affects the training that resumes from it."""
