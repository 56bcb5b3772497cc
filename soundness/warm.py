"""Imported once by the process that the killed ones are forked from: modules and kernels are loaded there."""

from __future__ import annotations

import contextlib
import importlib

import dpmf
from dpmf.accountants import Gaussian

_MODULES = "dpmf.strategies.unamplified evidence.engine evidence.backends dpmf.training._optimizer"
for _name in _MODULES.split():
    with contextlib.suppress(ImportError):
        importlib.import_module(_name)
_mechanism = dpmf.Mechanism(dpmf.strategies.bsr(2), dpmf.BallsInBins(2, 3))
dpmf.calibrate(_mechanism, target_epsilon=1.0, target_delta=1e-5, accountant=Gaussian())
with contextlib.suppress(ImportError):
    from evidence import quantities
    from evidence.spec import MechanismSpec

    quantities.QUANTITIES["divergence"](
        mechanism=MechanismSpec("bsr", 2, 10, 2).plain(), order=2, sigma=1.0, bandwidth=1
    )
