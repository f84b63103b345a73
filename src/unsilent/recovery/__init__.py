"""Actions after an alarm: restoring states, executing steps again, and a verdict on the kind of fault."""
