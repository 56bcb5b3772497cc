"""The errors that a caller may want to tell apart."""

from __future__ import annotations

import importlib
import sys
from typing import Any


class ArgumentError(ValueError):
    """An argument is not what it must be.

    Attributes:
      argument: the name of the argument, as in the signature of the function that was called.
      complaint: what is wrong with it. The message is the two, one after the other.
    """

    def __init__(self, argument: str, complaint: str) -> None:
        super().__init__(f"{argument} {complaint}")
        self.argument, self.complaint = argument, complaint

    def __reduce__(self) -> tuple[type[ArgumentError], tuple[str, str]]:
        return type(self), (self.argument, self.complaint)


class CalibrationError(ValueError):
    """No noise multiplier meets the target with the accountant and options given."""


class MissingExtraError(ImportError):
    """An optional dependency is needed; the message says what to install."""


def missing_extra(package: str, extra: str, purpose: str) -> MissingExtraError:
    """Return the error that says which extra to install for a purpose that needs a package.

    If it is made because the package is there, but lacks a name or a module that dpmf uses, it says that instead.
    """
    # dpmf is on no package index, and its name there may be anybody's: extras are installed from the sources.
    install = f"pip install '.[{extra}]' in a clone of dpmf"
    reason = sys.exc_info()[1]
    whole_package = isinstance(reason, ModuleNotFoundError) and "." not in (reason.name or "")
    if isinstance(reason, ImportError) and reason.name and not whole_package:
        said = (str(reason).splitlines() or ["it cannot be imported"])[0].partition(" (")[0]
        return MissingExtraError(
            f"{purpose} cannot use the installed version of {package}: {said}; "
            f"{install} in a fresh environment gives one that dpmf is tested with"
        )
    return MissingExtraError(f"{purpose} needs {package}: {install}")


def found_in(name: str, *places: str) -> Any:
    """Return a name of another package from the first of these modules that has it.

    Packages move their names between releases. If no module has it, the ImportError names all of them.
    """
    for place in places:
        try:
            return getattr(importlib.import_module(place), name)
        except (ModuleNotFoundError, AttributeError) as error:
            if isinstance(error, ModuleNotFoundError) and not place.startswith(error.name or " "):
                raise  # a package that this module itself needs
            if isinstance(error, ModuleNotFoundError) and "." not in (error.name or ""):
                raise  # the whole package is missing
    raise ImportError(f"there is no {name} in {' or '.join(places)}", name=places[0])


class TrainingError(RuntimeError):
    """Training cannot continue, or would no longer be the mechanism that was accounted for."""
