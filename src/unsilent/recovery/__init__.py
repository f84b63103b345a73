"""Actions after an alarm: states that are put back, steps that are executed again, and a verdict on what the fault was."""
