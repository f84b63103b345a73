"""The coverage studies: which detectors find which faults, how late, at what rate of false alarms and cost."""
