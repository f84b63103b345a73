"""Outputs of several tensors: which of them is judged, and that two models give them the same names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unsilent.basics.errors import UsageError
from unsilent.basics.nested import leaves_in
from unsilent.outcomes.base import Judge
from unsilent.outcomes.decision_judges import DecisionJudge, decision_tensor
from unsilent.outcomes.judges import Tolerance
from unsilent.outcomes.tensors import leaves


def judged_output(judge: Judge, output: Any) -> str:
    """Name and place of the one tensor that a judge looks at, of several; empty where there is one, or where it gets them all."""
    named = {".".join(path): tensor for path, leaf in leaves_in(output) for tensor in leaves(leaf)}
    if len(named) < 2 or not isinstance(judge, (DecisionJudge, Tolerance)):
        return ""
    judged = decision_tensor(named, judge, 0)
    place, name = next((i, name) for i, (name, tensor) in enumerate(named.items()) if tensor is judged)
    text = f"output {place + 1} of {len(named)}" if place else f"the first of {len(named)} outputs"
    return f"{name}, {text}" if isinstance(output, Mapping) else text


def in_order_of(original: Any, deployed: Any) -> Any:
    """The output of the deployed model, a dict in the order of that of the original; raises ``UsageError`` for other names."""
    if not isinstance(original, Mapping) or not isinstance(deployed, Mapping):
        return deployed
    if set(original) != set(deployed):
        names, others = (", ".join(map(repr, output)) or "none" for output in (original, deployed))
        raise UsageError(
            f"the original answers with {names} and the deployed model with {others}; expected outputs of the same names: let "
            "both models return the same ones"
        )
    return {name: in_order_of(part, deployed[name]) for name, part in original.items()}
