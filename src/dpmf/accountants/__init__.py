"""The accountants: each turns a mechanism and a noise multiplier into a bound on (ε, δ).

`protocol.py` says what an accountant is, `registry.py` knows them by name, and every other entry is one accountant.
Names are imported when they are first used, so that one accountant can be imported without the others.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpmf.accountants.baselines import PLDAccounting as PLDAccounting
    from dpmf.accountants.baselines import RandomAllocation as RandomAllocation
    from dpmf.accountants.cascade import Cascade as Cascade
    from dpmf.accountants.chain import Chain as Chain
    from dpmf.accountants.combined.auto import Auto as Auto
    from dpmf.accountants.combined.best import Best as Best
    from dpmf.accountants.conditional import Conditional as Conditional
    from dpmf.accountants.gaussian import Gaussian as Gaussian
    from dpmf.accountants.lattice import Lattice as Lattice
    from dpmf.accountants.moments import Moments as Moments
    from dpmf.accountants.monte_carlo import MonteCarlo as MonteCarlo
    from dpmf.accountants.own_bin import OwnBin as OwnBin
    from dpmf.accountants.protocol import Accountant as Accountant
    from dpmf.accountants.registry import ACCOUNTANTS as ACCOUNTANTS
    from dpmf.accountants.registry import resolve as resolve
    from dpmf.accountants.registry import suitable as suitable
    from dpmf.accountants.registry import with_options as with_options
    from dpmf.accountants.renyi import Renyi as Renyi

_HOME = {
    "ACCOUNTANTS": "registry",
    "Accountant": "protocol",
    "Auto": "combined.auto",
    "Best": "combined.best",
    "Cascade": "cascade",
    "Chain": "chain",
    "Conditional": "conditional",
    "Gaussian": "gaussian",
    "Lattice": "lattice",
    "Moments": "moments",
    "MonteCarlo": "monte_carlo",
    "OwnBin": "own_bin",
    "PLDAccounting": "baselines",
    "RandomAllocation": "baselines",
    "Renyi": "renyi",
    "resolve": "registry",
    "suitable": "registry",
    "with_options": "registry",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"dpmf.accountants.{_HOME[name]}"), name)
    raise AttributeError(f"module 'dpmf.accountants' has no attribute {name!r}")
