"""What an everyday loop with Opacus may do wrong without noticing: refused in one sentence that says how to fix it."""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from opacus.grad_sample.gsm_base import AbstractGradSampleModule
from opacus.optimizers import DPOptimizer

from dpmf.errors import ArgumentError, TrainingError
from dpmf.training._loader import tensors

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
        if isinstance(module, AbstractGradSampleModule) or hasattr(module, "autograd_grad_sample_hooks"):
            raise ArgumentError(
                "model",
                "must not belong to a private run already: make a new model, or take this one out of its run with "
                "unwrap() (two runs on the same records spend the privacy of both)",
            )
    if isinstance(optimizer, DPOptimizer):
        raise ArgumentError("optimizer", "must be an ordinary one of torch, not one that was made private before")


def refuse_direct_steps(optimizer: Any, private: Any) -> None:
    """Refuse steps of the original optimizer, which would follow gradients without noise."""

    def refuse(*_: object) -> None:
        if not private.stepping:
            raise TrainingError(
                "the optimizer that was given to make_private must not make steps itself, because it would follow "
                "gradients without noise: go on with model, optimizer and data loader that make_private has returned"
            )

    private.removable.append(optimizer.register_step_pre_hook(refuse))


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
        for name in ("autograd_grad_sample_hooks", "activations", "max_batch_len", "ft_compute_sample_grad"):
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


# Passes of the model that were never followed by a backward pass.


class Passes:
    """The forward passes in training mode, as two hooks around them: `before` and `after`.

    Opacus keeps the inputs of every layer until the backward pass. A pass without one (an evaluation outside of
    `torch.no_grad()`) would leave them there, and the next backward pass could not be told apart from it. Once the
    output of such a pass is gone, so that there can be no backward pass any more, its inputs are forgotten.
    """

    def __init__(self, parameters: list[Any], reduction: str):
        self._parameters = parameters
        self._reduction = reduction
        self._alive: list[weakref.ref[Any]] = []

    def __reduce__(self) -> Any:
        return Passes, ([], self._reduction)

    def unfinished(self) -> bool:
        """Whether Opacus waits for a backward pass."""
        return any(getattr(p, "_forward_counter", 0) for p in self._parameters)

    def before(self, module: Any, _arguments: Any) -> None:
        """Forget passes that cannot be followed by a backward pass any more."""
        if not (module.training and torch.is_grad_enabled()):
            return
        if not self.unfinished():
            self._alive.clear()
        elif all(token() is None for token in self._alive):
            self.forget(module)

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

    def after(self, module: Any, _arguments: Any, output: Any) -> None:
        """Watch an output: whether it is still there, and which loss its gradient comes from."""
        if not (module.training and torch.is_grad_enabled()):
            return
        for tensor in tensors(output):
            if tensor.requires_grad and tensor.grad_fn is not None:
                token = _Token()
                tensor.grad_fn.metadata["dpmf"] = token  # it lives as long as the graph does
                self._alive.append(weakref.ref(token))
                tensor.register_hook(partial(self._check, tensor.detach(), self._alive[-1]))

    def _check(self, output: Any, token: Any, gradient: Any) -> None:
        for root in _roots():
            problem = loss_problem(root, self._reduction, output=(output, gradient, token()))
            if problem is not None:
                raise TrainingError(problem)


class _Token:
    """Something that a weak reference can point to."""


def _roots() -> list[Any]:
    """The tensors that backward() was called on, inside a hook of the backward pass; none where torch hides them."""
    at: Any = None
    frames = sys._current_frames()
    try:
        for at in frames.values():  # with several devices, another thread runs the hooks than the one that has called
            while at is not None:
                if at.f_code.co_name == "_engine_run_backward":
                    return [t for t in at.f_locals.get("t_outputs", ()) if isinstance(t, torch.Tensor)]
                at = at.f_back
        return []
    finally:
        del at, frames  # this function's own frame is among them: it must not keep itself, and batches, alive


# What a loss may be the result of without another scale, as torch names the steps of a backward pass.
_TRANSPARENT = tuple(f"{name}Backward" for name in ("Add", "Neg", "View", "Squeeze", "ToCopy", "UnsafeView", "Clone"))
_SHAPES = (
    *_TRANSPARENT,
    *(f"{name}Backward" for name in ("LogSoftmax", "Transpose", "Permute", "Slice", "ReshapeAlias", "T")),
)
_MEAN, _SUM = 1, 2  # as torch numbers them


def loss_problem(loss: Any, declared: str, *, output: Any = None, records: int = 0) -> str | None:
    """What is wrong with how a loss combines records, as far as its graph shows; None if nothing is.

    The gradient of a record must not depend on other records. Opacus multiplies gradients by the size of the batch if
    the loss is declared to be a mean. If it is not one, they keep a factor that depends on how many others there are.

    Args:
      loss: what backward() was called on.
      declared: "mean" or "sum".
      output: in a hook of the backward pass, an output of the model, its gradient, and the mark of its node.
      records: before the backward pass, how many records there are.
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
            if name.startswith("NllLoss") and _unequal_labels(node, output, records):
                return (
                    "the loss divides by the number of labels in the batch, and records have different numbers of "
                    "them, so that a record changes the gradients of others: average over the labels of each record "
                    "first, then over the records"
                )
        elif node is not None:
            kinds.add(name)
    if kinds == {"mean" if declared == "sum" else "sum"}:
        (kind,) = kinds
        return (
            f"the loss is a {kind} over the batch, and make_private was told that it is a {declared}, so that "
            "gradients depend on the size of the batch and the guarantee does not hold: give make_private "
            f'loss_reduction="{kind}", or let the loss be a {declared} (reduction="{declared}")'
        )
    return None


def _by_one(node: Any) -> bool:
    """Whether a division is by 1, as trainers do it. During the backward pass that is not known any more."""
    try:
        return node._saved_other.numel() == 1 and float(node._saved_other) == 1.0
    except (AttributeError, RuntimeError):
        return False


def _unequal_labels(node: Any, output: Any, records: int) -> bool:
    """Whether records have different numbers of labels.

    Before the backward pass the labels are known. Within it they are gone, and what is looked for are positions without
    any gradient although the model is not certain about them: their labels were ignored.
    """
    if output is None:
        if not records or node._saved_target.numel() % records:
            return False
        counts = (node._saved_target != node._saved_ignore_index).reshape(records, -1).sum(dim=1)
    else:
        logits, gradient, mark = output
        for _ in range(10):  # from the loss to the output, unless there is more than a change of shape between them
            node = node.next_functions[0][0] if node.next_functions else None
            if node is None or node.metadata.get("dpmf") is mark:
                break
            if not node.name().startswith(_SHAPES):
                return False
        if node is None or gradient.ndim < 2 or len(gradient) == 0:
            return False
        uncertain = (logits.float().softmax(dim=-1) > 1e-30).sum(dim=-1) > 1
        ignored = (gradient == 0).all(dim=-1) & uncertain
        counts = ignored.reshape(len(gradient), -1).sum(dim=1)
    return bool((counts != counts[0]).any())
