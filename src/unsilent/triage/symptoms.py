"""Symptoms that a report in words may name."""

from __future__ import annotations

import re

SLOW, STUCK, NONFINITE, LOSS_ROSE, DIFFER, DISK = "slow", "stuck", "not finite", "loss rose", "ranks differ", "disk"
_SYMPTOMS = {
    SLOW: r"\bslow\w*|\bstraggl\w+|throughput|longer than|takes long",
    STUCK: r"\bstuck\b|\bhang\w*|\bhung\b|\bfroze\w*|\bfrozen\b|deadlock\w*|no progress|\btime[ds]? ?out\b|\bdied\b|\bkilled\b",
    NONFINITE: r"\bnans?\b|\binf\b|\binfinit\w+|not finite|non-?finite|overflow\w*",
    LOSS_ROSE: r"loss\W+(?:\w+\W+){0,3}(?:rose|ris\w+|spik\w+|jump\w*|diverg\w+|went up|goes up|higher|explod\w+|blew up)"
    r"|(?:spike|jump|rise) (?:in|of) (?:the )?loss",
    DIFFER: r"\breplicas?\b|ranks (?:\w+ )?(?:differ|disagree|diverge)\w*|out of sync|desync\w*",
    DISK: r"\bdisks?\b|no space|\bquota\b|\bfile ?system\b",
}  # fmt: skip
_PATTERNS = {name: re.compile(pattern, re.IGNORECASE) for name, pattern in _SYMPTOMS.items()}


def symptoms_in(report: str) -> frozenset[str]:
    """Symptoms that a report names. Whether it denies them is not looked at."""
    return frozenset(name for name, pattern in _PATTERNS.items() if pattern.search(report))
