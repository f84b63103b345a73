"""What a corrupted bit in a checkpoint does to the training that resumes from it, under several strategies of distribution."""
