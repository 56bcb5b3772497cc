"""What an everyday loop with Opacus may do wrong without noticing: refused in one sentence that says how to fix it."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from opacus.grad_sample.gsm_base import AbstractGradSampleModule
from opacus.optimizers import DPOptimizer
from torch.utils._pytree import tree_map_only

from dpmf.errors import ArgumentError, TrainingError
from dpmf.training._loader import tensors
from dpmf.training._optimizer import PrivateOptimizer
from dpmf.training.step import Step

_PREFIX = "_module."  # of the names of a model that Opacus has wrapped


def check_new(model: Any, optimizer: Any) -> None:
    """Refuse a model that is compiled, or a model or optimizer that belongs to a private run already."""
    for module in model.modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise ArgumentError(
                "model",
                "must not be compiled: Opacus takes the gradient of every record in hooks, which torch.compile may "
                "leave out. Give make_private the model from before torch.compile",
            )
        if isinstance(module, AbstractGradSampleModule) or "dpmf_run" in module.__dict__:
            raise ArgumentError(
                "model",
                "must not belong to a private run already: make a new model, or take this one out of its run with "
                "unwrap() (two runs on the same records spend the privacy of both)",
            )
    if isinstance(optimizer, DPOptimizer | PrivateOptimizer):
        raise ArgumentError("optimizer", "must be an ordinary one of torch, not one that was made private before")


# Names. The wrapped model has those of the model that make_private was given, and a copy of it is an ordinary module.


def keep_names(module: Any) -> None:
    """Make `state_dict()` of a wrapped model use the names of the model inside; both kinds of names can be loaded."""
    module.register_state_dict_post_hook(_without_prefix)
    module.register_load_state_dict_pre_hook(_with_prefix)
    module.__deepcopy__ = partial(_plain_copy, module)


def plain_names(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state with the names of the model inside, whichever it has."""
    return {name.removeprefix(_PREFIX): value for name, value in state.items()}


def _renamed(state: dict[str, Any], before: str, after: str) -> None:
    for name in [name for name in state if name.startswith(before)]:
        state[after + name.removeprefix(before)] = state.pop(name)


def _without_prefix(_module: Any, state: Any, prefix: str, _metadata: Any) -> None:
    _renamed(state, prefix + _PREFIX, prefix)
    _renamed(getattr(state, "_metadata", {}), prefix + _PREFIX, prefix)  # versions of the layers


def _with_prefix(_module: Any, state: Any, prefix: str, *_: Any) -> None:
    if not any(name.startswith(prefix + _PREFIX) for name in state):
        _renamed(state, prefix, prefix + _PREFIX)


def _plain_copy(module: Any, memo: dict[int, Any]) -> Any:
    """A copy of the model inside, without Opacus' hooks: for averages of models, evaluation, or to keep the best."""
    holder = _Copied()
    memo[id(module)] = holder
    for hooks in _all_hooks(module._module):
        memo.update({id(hook): holder for hook in hooks.values() if _is_of_opacus(hook)})
    kept = module._module.__dict__.get("autograd_grad_sample_hooks")
    if kept is not None:
        memo[id(kept)] = []  # the handles of these hooks
    copied = copy.deepcopy(module._module, memo)
    for hooks in _all_hooks(copied):
        for key in [key for key, hook in hooks.items() if hook is holder]:
            del hooks[key]
    for part in copied.modules():
        for name in (
            "dpmf_run",
            "autograd_grad_sample_hooks",
            "activations",
            "max_batch_len",
            "ft_compute_sample_grad",
        ):
            part.__dict__.pop(name, None)
    return copied


class _Copied:
    """Stands for Opacus' hooks while a model is copied."""


def _is_of_opacus(hook: Any) -> bool:
    return isinstance(getattr(getattr(hook, "func", hook), "__self__", None), AbstractGradSampleModule)


def _all_hooks(module: Any) -> Iterator[Any]:
    for part in module.modules():
        for name in ("_forward_hooks", "_backward_hooks"):
            yield part.__dict__[name]


# Passes of the model: what they are given, whether a backward pass follows, and from which loss.


class _Mark(NamedTuple):
    """Marks the node of an output in the graph of a loss: how losses combine records, and how many there are."""

    reduction: str
    records: int
    alive: Any


class _Alive:
    """Something that a weak reference can point to; it lives as long as the graph does."""


class Output(torch.Tensor):  # type: ignore[misc]
    """An output of a private model, and whatever is computed from it. Its `backward` is looked at before it runs."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        if function is torch.Tensor.backward and (mark := _mark(arguments[0].grad_fn)) is not None:
            problem = loss_problem(arguments[0], mark.reduction, records=mark.records)
            if problem is not None:
                raise TrainingError(problem)
        return super().__torch_function__(function, types, arguments, keywords or {})


def _mark(node: Any) -> _Mark | None:
    """The mark of an output in a graph, looked for near its root."""
    todo, seen = [node], 0
    while todo and seen < 1000:
        found, seen = todo.pop(0), seen + 1
        if found is not None:
            if "dpmf" in found.metadata:
                mark: _Mark = found.metadata["dpmf"]
                return mark
            todo += [following for following, _ in found.next_functions]
    return None


class Passes:
    """The forward passes in training mode, as two hooks around them: `before` and `after`.

    Opacus keeps the inputs of every layer until the backward pass. A pass without one (an evaluation outside of
    `torch.no_grad()`) would leave them there, and the next backward pass could not be told apart from it. Once the
    output of such a pass is gone, so that there can be no backward pass any more, its inputs are forgotten.
    """

    def __init__(self, step: Step, parameters: list[Any], reduction: str):
        self._step, self._parameters, self.reduction = step, parameters, reduction
        self._begun = 0  # iterations over the loader that were seen
        self._alive: list[weakref.ref[Any]] = []

    def __reduce__(self) -> Any:
        return _Unguarded, ()

    def unfinished(self) -> bool:
        """Whether Opacus waits for a backward pass."""
        return any(getattr(p, "_forward_counter", 0) for p in self._parameters)

    def before(self, module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Refuse tensors of an earlier batch (copies of them carry no mark), and forget passes that are over."""
        if not (module.training and torch.is_grad_enabled()):
            return
        part = self._step.part
        for tensor in tensors([arguments, keywords]):
            if getattr(tensor, "_dpmf_part", part) != part:
                raise TrainingError(
                    f"the model was given a batch that is not the last one of the data loader: step {self._step.t} "
                    "must be made on the batch that was just delivered (evaluate with torch.no_grad())"
                )
        if not self.unfinished():
            self._alive.clear()
        elif self._begun != self._step.begun or all(alive() is None for alive in self._alive):
            self.forget(module)
        self._begun = self._step.begun

    def forget(self, module: Any) -> None:
        """Forget every pass that was not followed by a backward pass."""
        self._alive.clear()
        if not self.unfinished():
            return
        for part in module.modules():
            part.__dict__.pop("max_batch_len", None)
            if "activations" in part.__dict__:
                part.activations = []
        for p in module.parameters():
            if hasattr(p, "_forward_counter"):
                p._forward_counter = 0
            p.__dict__.pop("_current_grad_sample", None)

    def after(self, module: Any, _arguments: Any, output: Any) -> Any:
        """Watch an output: whether it is still there, and which loss its gradient comes from."""
        if not (module.training and torch.is_grad_enabled()):
            return None

        def watched(tensor: Any) -> Any:
            if tensor.grad_fn is None:
                return tensor
            found, alive = tensor.as_subclass(Output), _Alive()
            found.grad_fn.metadata["dpmf"] = _Mark(self.reduction, len(tensor) if tensor.dim() else 1, alive)
            self._alive.append(weakref.ref(alive))
            return found

        return tree_map_only(torch.Tensor, watched, output)


class _Unguarded:
    """Stands for the hooks of a copied or pickled model, which is not what is trained: they refuse nothing."""

    def before(self, *_: object) -> None:
        pass

    def after(self, *_: object) -> None:
        pass


# What a loss may be the result of without another scale, as torch names the steps of a backward pass.
_TRANSPARENT = tuple(
    f"{name}Backward" for name in ("Add", "Neg", "View", "Squeeze", "ToCopy", "UnsafeView", "Clone", "Alias")
)
_MEAN, _SUM = 1, 2  # as torch numbers them


def loss_problem(loss: Any, declared: str, *, records: int) -> str | None:
    """What is wrong with how a loss combines records, as far as its graph shows; None if nothing is.

    The gradient of a record must not depend on other records. Opacus multiplies gradients by the size of the batch if
    the loss is declared to be a mean. If it is not one, they keep a factor that depends on how many others there are.

    Args:
      loss: what backward() is about to be called on.
      declared: "mean" or "sum".
      records: how many records there are.
    """
    kinds: set[str] = set()
    todo = [loss.grad_fn]
    while todo and len(kinds) < 20:
        node = todo.pop()
        name = "" if node is None else node.name()
        reduction = getattr(node, "_saved_reduction", None)
        if name.startswith(_TRANSPARENT) or (name.startswith("DivBackward") and _by_one(node)):
            todo += [following for following, _ in node.next_functions]
        elif reduction == _SUM or (reduction is None and name.startswith("SumBackward")):
            kinds.add("sum")
        elif reduction == _MEAN or name.startswith("MeanBackward"):
            kinds.add("mean")
            if name.startswith("NllLoss") and _unequal_labels(node, records):
                return (
                    "the loss divides by the number of labels in the batch, and records have different numbers of "
                    "them, so that a record changes the gradients of others: average over the labels of each record "
                    "first, then over the records"
                )
        elif node is not None:
            kinds.add(name)
    if records > 1 and kinds == {"mean" if declared == "sum" else "sum"}:  # of one record both are the same
        (kind,) = kinds
        return (
            f"the loss is a {kind} over the batch, and make_private was told that it is a {declared}, so that "
            "gradients depend on the size of the batch and the guarantee does not hold: give make_private "
            f'loss_reduction="{kind}", or let the loss be a {declared} (reduction="{declared}")'
        )
    return None


def _by_one(node: Any) -> bool:
    """Whether a division is by 1, as trainers do it."""
    try:
        return node._saved_other.numel() == 1 and float(node._saved_other) == 1.0
    except (AttributeError, RuntimeError):
        return False


def _unequal_labels(node: Any, records: int) -> bool:
    """Whether records have different numbers of labels."""
    if not records or node._saved_target.numel() % records:
        return False
    counts = (node._saved_target != node._saved_ignore_index).reshape(records, -1).sum(dim=1)
    return bool((counts != counts[0]).any())
