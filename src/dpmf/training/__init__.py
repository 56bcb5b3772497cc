"""Training that does exactly what was accounted for: batches, the noise C⁻¹Z, adapters for frameworks.

| name | what it is | needs |
|---|---|---|
| `BatchSampler` | batches, for torch, numpy and JAX | |
| `NoiseStream` | the rows of C⁻¹Z in bounded memory, on numpy or torch | |
| `noise_levels` | how much noise each step adds | |
| `make_private` | model, optimizer, dataset, mechanism → private training in PyTorch | torch, opacus |
| `huggingface` | the same for a `Trainer` of transformers | transformers |
| `lightning` | the same for a `Trainer` of Lightning | lightning |
| `jax` | the same as pure functions, for compiled steps | jax, optax |
| `sharding` | noise for models that several processes share | torch |
| `checkpoint` | files that are whole or refused | |
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpmf.training import checkpoint as checkpoint
    from dpmf.training import jax as jax
    from dpmf.training import sharding as sharding
    from dpmf.training.levels import noise_levels as noise_levels
    from dpmf.training.noise import NoiseStream as NoiseStream
    from dpmf.training.opacus import PrivateTraining as PrivateTraining
    from dpmf.training.opacus import make_private as make_private
    from dpmf.training.sampler import BatchSampler as BatchSampler

_HOME = {
    "BatchSampler": "sampler",
    "NoiseStream": "noise",
    "PrivateTraining": "opacus",
    "make_private": "opacus",
    "noise_levels": "levels",
}
_MODULES = ("checkpoint", "huggingface", "jax", "lightning", "sharding")

__all__ = [
    "BatchSampler",
    "NoiseStream",
    "PrivateTraining",
    "checkpoint",
    "jax",
    "make_private",
    "noise_levels",
    "sharding",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"dpmf.training.{name}")
    if name in _HOME:
        return getattr(importlib.import_module(f"dpmf.training.{_HOME[name]}"), name)
    raise AttributeError(f"module 'dpmf.training' has no attribute {name!r}")
