"""Lets mkdocstrings show functions that are made at run time, such as ``pvf = campaign_function(…)``, as functions.

It reads the code without executing it, and would show their source alone. Their arguments and docstrings are those of the object.
"""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

import griffe

MAKERS = ("campaign_function(", "names_arguments(")
"""The value that a name of such a function is assigned."""
MODULE_OF_TYPE = r"\b(?:collections\.abc|pathlib|typing|unsilent(?:\.\w+)+)\.(?=[A-Z])"


class GeneratedFunctions(griffe.Extension):
    """An extension of griffe that replaces names of functions that are made at run time by functions."""

    def on_module_members(self, *, mod: griffe.Module, **kwargs: Any) -> None:
        """Replace them in a module that was read."""
        for name, member in list(mod.members.items()):
            if not member.is_alias and member.is_attribute and str(member.value).startswith(MAKERS):
                value = getattr(importlib.import_module(mod.path), name)
                mod.set_member(name, _function(value, member.lineno, member.endlineno))


def _function(value: Any, first: int | None, last: int | None) -> griffe.Function:
    """A function as its signature and its docstring say."""
    signature = inspect.signature(value)
    parameters = [
        griffe.Parameter(
            parameter.name,
            annotation=_type(parameter.annotation),
            kind=griffe.ParameterKind(parameter.kind.description),
            default=None if parameter.default is parameter.empty else repr(parameter.default),
        )
        for parameter in signature.parameters.values()
    ]
    shown = griffe.Function(
        value.__name__,
        parameters=griffe.Parameters(*parameters),
        returns=_type(signature.return_annotation),
        lineno=first,
        endlineno=last,
    )
    shown.docstring = griffe.Docstring(_markdown(inspect.getdoc(value) or ""), parent=shown, parser="google")
    return shown


def _markdown(text: str) -> str:
    """A docstring whose globs and products, as ``layer1.*``, are not taken for emphasis."""
    return "".join(
        part if part.startswith("`") else part.replace("*", r"\*") for part in re.split(r"(``?[^`]+``?)", text)
    )


def _type(annotation: Any) -> str | None:
    """A type without the module that it is from; None where there is none."""
    if annotation is inspect.Parameter.empty:
        return None
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(MODULE_OF_TYPE, "", text)
