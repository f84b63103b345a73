"""The coverage study of inference: which detectors find which faults, and which mitigations restore answers."""
