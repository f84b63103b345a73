"""Families and kinds of planned causes, with the kinds of findings that name each."""

from __future__ import annotations

from unsilent.triage.findings import FindingKind

HEALTHY = "healthy"
REAL = "real "
"""Prefix of the kind of fault in the family of an incident of real processes, for example ``real transient``."""
HEALTHY_KINDS = ("nothing", "learning rate by plan", "unusual batch", "other data for all", "noisy time")
K = FindingKind
NAMING: dict[tuple[str, str], frozenset[FindingKind]] = {
    # Bits of a parameter changed without a write; the rank's parameters then differ from those of its replicas.
    ("weight bits", "exponent bit"): frozenset({K.CHANGED_BITS, K.UNLIKE_PARAMETERS, K.STATE}),
    ("weight bits", "sign bit"): frozenset({K.CHANGED_BITS, K.UNLIKE_PARAMETERS, K.STATE}),
    ("weight bits", "zeroed elements"): frozenset({K.CHANGED_BITS, K.UNLIKE_PARAMETERS, K.STATE}),
    # One rank's own computation in a step. The largest exponent makes a gradient that is not finite.
    ("gradient bits", "exponent bit"): frozenset({K.GRADIENT, K.NONFINITE, K.TRANSIENT}),
    ("gradient bits", "stuck lane"): frozenset({K.GRADIENT, K.TRANSIENT, K.DEVICE}),
    ("gradient bits", "scaled"): frozenset({K.GRADIENT, K.TRANSIENT}),
    ("optimizer bits", "first moment"): frozenset({K.STATE, K.CHANGED_BITS}),
    ("optimizer bits", "second moment"): frozenset({K.STATE, K.CHANGED_BITS}),
    # A wrong result in one rank makes its parameters differ from the others; a part that is left out was never sent.
    ("payload", "changed result"): frozenset({K.UNLIKE_PARAMETERS}),
    ("payload", "lost contribution"): frozenset({K.UNLIKE_PARAMETERS, K.UNLIKE_COLLECTIVES, K.ABSENT_RANK}),
    ("replica", "skipped update"): frozenset({K.UNLIKE_PARAMETERS, K.STATE}),
    ("replica", "other weights"): frozenset({K.UNLIKE_PARAMETERS, K.STATE}),
    ("checkpoint", "damaged for all"): frozenset(
        {K.COMMON_STATE, K.CHECKPOINT_FILE, K.CHECKPOINT_VALUES, K.CHECKPOINT}
    ),
    ("checkpoint", "stale on one rank"): frozenset({K.UNLIKE_PARAMETERS, K.STATE, K.CHECKPOINT}),
    ("data", "NaN"): frozenset({K.BATCH, K.DATA}),
    ("data", "shuffled labels"): frozenset({K.BATCH, K.DATA}),
    ("data", "repeated shard"): frozenset({K.BATCH, K.DATA}),
    ("configuration", "learning rate"): frozenset({K.SETTINGS}),
    ("configuration", "seed"): frozenset({K.SETTINGS}),
    ("configuration", "gradients not zeroed"): frozenset({K.SETTINGS}),
    ("precision", "bfloat16 weights"): frozenset({K.SETTINGS, K.NUMERICS}),
    ("precision", "float16 overflow"): frozenset({K.NONFINITE, K.NUMERICS}),
    ("time", "slow rank"): frozenset({K.LATE_RANK}),
    ("time", "slow loader"): frozenset({K.LATE_RANK}),
    ("stopped", "killed process"): frozenset({K.ABSENT_RANK, K.LOGGED_ERROR}),
    ("stopped", "hang"): frozenset({K.ABSENT_RANK}),
    ("disk", "full disk"): frozenset({K.LOGGED_ERROR, K.CHECKPOINT_FILE}),
    # Events of healthy runs are not faults: the right answer is that nothing was found.
    **{(HEALTHY, kind): frozenset[FindingKind]() for kind in HEALTHY_KINDS},
}
"""Kinds of findings that name the cause, by family and kind, in the order in which causes are planned."""
NAMING_REAL: dict[str, frozenset[FindingKind]] = {
    # A replay shows whether the fault recurs; the gradient alone shows that the rank computed it wrongly, which is the kind.
    f"{REAL}transient": frozenset({K.TRANSIENT, K.GRADIENT}),
    f"{REAL}device": frozenset({K.DEVICE, K.GRADIENT}),
    f"{REAL}checkpoint": frozenset({K.CHECKPOINT, K.COMMON_STATE}),
    f"{REAL}data": frozenset({K.DATA, K.BATCH}),
    f"{REAL}numerics": frozenset({K.NUMERICS, K.NONFINITE}),
    f"{REAL}benign": frozenset(),  # a healthy change, like those of `HEALTHY`
}
"""Kinds of findings that name the cause in jobs with real processes, by family. The kinds of these causes are the varieties of
`incidents.plant`."""
WORDS_OF_SETTINGS = {
    "learning rate": ("lr", "rate"), "seed": ("seed",), "gradients not zeroed": ("zero", "accumul"),
    "bfloat16 weights": ("dtype", "precision", "bfloat16"),
}  # fmt: skip
"""A finding of settings names the changed setting if its tensor contains one of these words, by kind."""
WITHOUT_STEP = frozenset({K.SETTINGS, K.CHECKPOINT_FILE, K.CHECKPOINT_VALUES, K.LOGGED_ERROR})
"""Kinds of findings in a file, which is their place; they have no step."""
