"""Which detector finds which faults of an inference, with how many false alarms, how early, and what brings answers back."""
