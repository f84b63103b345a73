"""Python functions whose arguments, docstrings and checks are generated from option dataclasses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from unsilent.basics.argument_names import name_arguments_in, names_arguments
from unsilent.basics.options import OptionField, options_of

T = TypeVar("T")
REQUIRED = inspect.Parameter.empty
RAISES = """Raises:
    UsageError: Input that does not fit, or that cannot be run.
    StoreError: A store cannot be used."""


@dataclass(frozen=True)
class Argument:
    """An argument of a function: an option, or a value that only Python callers can give.

    Attributes:
        hint: Type that the signature shows.
        default: Default value; with `REQUIRED` the argument may be given without its name.
    """

    name: str
    hint: Any
    help: str
    default: Any = None

    @classmethod
    def of_option(cls, option: OptionField) -> Argument:
        """The argument for an option."""
        default = f" Default: {option.option.default_text}." if option.option.default_text else ""
        value = REQUIRED if option.option.missing_error else option.default
        return cls(option.python_name, option.argument_hint, option.option.help + default, value)

    @property
    def parameter(self) -> inspect.Parameter:
        """The argument as a parameter of a Python signature."""
        positional, keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
        kind = positional if self.default is REQUIRED else keyword
        return inspect.Parameter(self.name, kind, default=self.default, annotation=self.hint)


OBSERVER = Argument("observer", "Observer | None", "Notified of progress, see `unsilent.campaigns.observer.Observer`.")


def option_function(
    name: str,
    run: Callable[[Mapping[str, Any]], T],
    option_classes: Sequence[type],
    text: str,
    *,
    module: str,
    further: Sequence[Argument] = (),
    returns: type[T] | None = None,
) -> Callable[..., T]:
    """Make a function whose arguments are the options of dataclasses, with errors that name arguments.

    Args:
        run: Function that is called with all arguments by name, including defaults.
        text: First part of the docstring, before the list of arguments.
        module: Module that contains the function, so that it can be pickled.
        further: Arguments besides the options, or instead of the option with the same name.
        returns: Class of the returned value; None: the docstring does not name it.
    """
    options = [Argument.of_option(option) for option in options_of(*option_classes).values()]
    by_name = {argument.name: argument for argument in (*options, *further)}
    arguments = sorted(by_name.values(), key=lambda argument: argument.default is not REQUIRED)
    annotation = inspect.Signature.empty if returns is None else returns
    signature = inspect.Signature([argument.parameter for argument in arguments], return_annotation=annotation)

    def function(*args: Any, **kwargs: Any) -> T:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{name}() {error}") from None
        bound.apply_defaults()
        return run(bound.arguments)

    lines = [text.strip(), "", "Args:"]
    lines += [f"    {argument.name}: {name_arguments_in(argument.help, by_name)}" for argument in arguments]
    if returns is not None:
        first = inspect.cleandoc(returns.__doc__ or "").partition("\n")[0]
        lines += ["", "Returns:", f"    {returns.__name__}: {first}", "", RAISES]
    function.__name__ = function.__qualname__ = name
    function.__module__, function.__doc__ = module, "\n".join(lines)
    function.__signature__ = signature  # type: ignore[attr-defined]
    return names_arguments(function)
