"""Which rule of a monitor detects which faults of a training, with how many false alarms, how late and at what cost."""
