"""Which detectors find which faults of a training, or of an inference, with how many false alarms, how late, at what cost."""
