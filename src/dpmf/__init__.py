"""dpmf: guaranteed noise multipliers for differentially private training with correlated noise.

    Strategy × BallsInBins → Mechanism → Gram matrix → Accountant → bound

Names are imported when first used, so that ``import dpmf`` and the command line start quickly.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dpmf._version import __version__

if TYPE_CHECKING:
    from dpmf import accountants as accountants
    from dpmf import strategies as strategies
    from dpmf import training as training
    from dpmf import workloads as workloads
    from dpmf.api import calibrate as calibrate
    from dpmf.api import delta as delta
    from dpmf.api import epsilon as epsilon
    from dpmf.api import profile as profile
    from dpmf.attacks import TradeOff as TradeOff
    from dpmf.attacks import tradeoff as tradeoff
    from dpmf.batching import BallsInBins as BallsInBins
    from dpmf.batching import Poisson as Poisson
    from dpmf.batching import cyclic_poisson as cyclic_poisson
    from dpmf.batching import reshuffled as reshuffled
    from dpmf.designs import Design as Design
    from dpmf.designs import design as design
    from dpmf.errors import CalibrationError as CalibrationError
    from dpmf.errors import MissingExtraError as MissingExtraError
    from dpmf.errors import TrainingError as TrainingError
    from dpmf.groups import group_privacy as group_privacy
    from dpmf.mechanism import Mechanism as Mechanism
    from dpmf.paper import Statement as Statement
    from dpmf.paper import statement as statement
    from dpmf.results import Calibration as Calibration
    from dpmf.results import CalibrationEstimate as CalibrationEstimate
    from dpmf.results import Estimate as Estimate
    from dpmf.results import PrivacyBound as PrivacyBound
    from dpmf.results import PrivacyProfile as PrivacyProfile
    from dpmf.run import Run as Run
    from dpmf.targets import calibrate_to_attack as calibrate_to_attack
    from dpmf.targets import calibrate_to_mu as calibrate_to_mu
    from dpmf.workloads import error as error

_HOME = {
    "BallsInBins": "dpmf.batching",
    "Poisson": "dpmf.batching",
    "cyclic_poisson": "dpmf.batching",
    "reshuffled": "dpmf.batching",
    "Calibration": "dpmf.results",
    "CalibrationEstimate": "dpmf.results",
    "CalibrationError": "dpmf.errors",
    "Design": "dpmf.designs",
    "Estimate": "dpmf.results",
    "Mechanism": "dpmf.mechanism",
    "MissingExtraError": "dpmf.errors",
    "PrivacyBound": "dpmf.results",
    "PrivacyProfile": "dpmf.results",
    "Run": "dpmf.run",
    "Statement": "dpmf.paper",
    "TradeOff": "dpmf.attacks",
    "TrainingError": "dpmf.errors",
    "calibrate": "dpmf.api",
    "calibrate_to_attack": "dpmf.targets",
    "calibrate_to_mu": "dpmf.targets",
    "delta": "dpmf.api",
    "design": "dpmf.designs",
    "epsilon": "dpmf.api",
    "error": "dpmf.workloads",
    "group_privacy": "dpmf.groups",
    "profile": "dpmf.api",
    "statement": "dpmf.paper",
    "tradeoff": "dpmf.attacks",
}
_MODULES = ("accountants", "strategies", "training", "workloads")

__all__ = ["__version__", *_HOME, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"dpmf.{name}")
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'dpmf' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
