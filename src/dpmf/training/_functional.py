"""A whole step from the loss of one record, by `torch.func`: nothing to guess about how a loss combines records."""

from __future__ import annotations

from typing import Any

import torch
from torch.func import functional_call, grad, vmap
from torch.utils._pytree import tree_leaves, tree_map_only

from dpmf import validation
from dpmf.errors import ArgumentError, TrainingError
from dpmf.training.step import Step


class _Model:
    """The module with other weights, as losses call it."""

    def __init__(self, module: Any, weights: dict[str, Any]):
        self._module, self._weights = module, weights

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return functional_call(self._module, self._weights, arguments, keywords)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def step(wrapped: Any, parameters: list[Any], current: Step, loss: Any, batch: Any, largest: int | None) -> None:
    """Hand the gradients of the records of a batch to a step, in parts of at most so many records."""
    if not callable(loss):
        raise validation.wrong("loss", "a function of (model, record)", loss)
    if (problem := current.problem(current.size)) is not None:
        current.agree(problem)
    most = current.size if largest is None else validation.integer("largest", largest, at_least=1)
    leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    for leaf in leaves:
        if getattr(leaf, "_dpmf_part", current.part) != current.part:
            raise TrainingError(f"step {current.t} must be made on the batch that the data loader has just delivered")
        if leaf.dim() == 0 or len(leaf) != current.size:
            raise ArgumentError(
                "batch", f"must have one row for each of the {current.size} records that were delivered, in every "
                f"tensor, got shape {tuple(leaf.shape)}",
            )  # fmt: skip
    if not current.size:
        current.add([p.new_zeros((0, *p.shape)) for p in parameters])
        return
    module = wrapped._module
    names = {id(p): name for name, p in module.named_parameters()}
    weights = {names[id(p)]: p.detach() for p in parameters}

    def one(trained: dict[str, Any], record: Any) -> Any:
        value = loss(_Model(module, trained), record)
        if not isinstance(value, torch.Tensor) or value.dim():
            raise ArgumentError("loss", f"must return one number for a record, got {getattr(value, 'shape', value)}")
        return value

    if hasattr(module, "autograd_grad_sample_hooks"):
        wrapped.remove_hooks()  # those of Opacus, which torch.func cannot trace
    each = vmap(grad(one), in_dims=(None, 0), randomness="different")
    for piece in current.pieces(most):
        part = tree_map_only(torch.Tensor, lambda value, piece=piece: value[piece], batch)
        with current.draws.active():
            samples = each(weights, part)
        current.add([samples[names[id(p)]] for p in parameters])
