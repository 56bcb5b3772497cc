"""Errors a caller may want to tell apart. Wrong arguments are plain ``ValueError``s (see ``validation``)."""


class CalibrationError(ValueError):
    """No noise multiplier meets the target with the accountant and options given."""


class MissingExtraError(ImportError):
    """An optional dependency is needed; the message says what to install."""


def missing_extra(package: str, extra: str, purpose: str) -> MissingExtraError:
    return MissingExtraError(f"{purpose} needs {package}: pip install 'dpmf[{extra}]'")


class TrainingError(RuntimeError):
    """Going on would no longer be the mechanism that was accounted for, or training cannot go on."""
