"""The trainings of He et al. (ISCA 2023), rebuilt: networks, the workers of a step, and injected faults."""
