"""The errors that a caller may want to tell apart."""

from __future__ import annotations


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
    """Return the error that says which extra to install for a purpose that needs a package."""
    return MissingExtraError(f"{purpose} needs {package}: pip install 'dpmf[{extra}]'")


class TrainingError(RuntimeError):
    """Training cannot continue, or would no longer be the mechanism that was accounted for."""
