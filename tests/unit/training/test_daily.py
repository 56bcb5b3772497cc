"""What a first script with make_private does: it works, or one sentence says what is wrong and how to fix it."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from private_runs import MECHANISM, N, dataset, linear, private, step, train, weights

from dpmf.errors import ArgumentError, TrainingError
from dpmf.training import PrivateTraining, _target, make_private

torch = pytest.importorskip("torch")
pytest.importorskip("opacus")
functional = torch.nn.functional


def loss(run: PrivateTraining, batch: Any, **options: Any) -> Any:
    return functional.cross_entropy(run.model(batch[0]), batch[1], **options)


def first_batch(run: PrivateTraining) -> Any:
    return next(iter(run.data_loader))


# Passes without a backward pass.


def test_an_evaluation_with_gradients_between_two_steps_changes_nothing() -> None:
    plain, evaluated = private(model=linear()), private(model=linear())
    train(plain, 4)
    train(evaluated, 4, after=lambda: evaluated.model(torch.randn(5, 1, 6, 6)).argmax())
    assert np.array_equal(weights(plain), weights(evaluated))


def test_an_evaluation_within_a_step_is_explained_and_can_be_mended() -> None:
    run = private(model=linear())
    batch = first_batch(run)
    kept = run.model(torch.randn(5, 1, 6, 6))  # still needed, so that a backward pass may come
    with pytest.raises(TrainingError, match=r"evaluate in eval mode or under torch.no_grad\(\)"):
        step(run, batch)
    del kept
    train(run, 2)
    plain = private(model=linear())
    train(plain, 2)
    assert np.array_equal(weights(run), weights(plain))


def test_parameters_that_have_no_gradient() -> None:
    model = torch.nn.ModuleDict({"used": torch.nn.Linear(36, 3), "unused": torch.nn.Linear(2, 2)})
    model.forward = lambda x: model["used"](x.flatten(1))
    run = private(model=model)
    with pytest.raises(TrainingError, match=r"2 of the trained parameters have no gradient .*shape \(2, 2\)"):
        step(run, first_batch(run))
    run = private()
    with pytest.raises(TrainingError, match="step 0 has no gradients"):
        run.optimizer.step()


# Losses. The gradient of a record must not depend on how many others there are, or on what they are.

LOSSES: dict[str, tuple[Callable[[Any, Any], Any], str | None]] = {
    "mean": (functional.cross_entropy, None),
    "sum": (lambda z, y: functional.cross_entropy(z, y, reduction="sum"), "sum"),
    "sum of losses": (lambda z, y: functional.cross_entropy(z, y, reduction="none").sum(), "sum"),
    "sum of squares": (lambda z, y: functional.mse_loss(z, z.detach() + 1, reduction="sum"), "sum"),
    "sum, divided": (lambda z, y: functional.cross_entropy(z, y, reduction="sum") / max(len(y), 1), None),
    "two means": (lambda z, y: functional.cross_entropy(z, y) + z.square().mean(), None),
    "certain predictions": (lambda z, y: functional.cross_entropy(z * 0 + 1e4 * functional.one_hot(y, 3), y), None),
    "ignored labels": (
        lambda z, y: functional.cross_entropy(z, torch.where(torch.arange(len(y)) == 0, -100, y)),
        "different numbers",
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_how_the_loss_combines_records(name: str) -> None:
    function, kind = LOSSES[name]
    for declared in ("mean", "sum"):
        run = private(model=linear(), loss_reduction=declared)
        x, y = next(batch for batch in run.data_loader if len(batch[0]) > 1)
        value = function(run.model(x), y)
        wrong = (
            kind is not None and kind != declared
            if declared == "mean"
            else name in ("mean", "two means", "certain predictions") or (name == "ignored labels")
        )
        if wrong:
            with pytest.raises(TrainingError, match=r"the loss (is a|divides)"):
                value.backward()
        else:
            value.backward()


def test_a_grad_scaler_is_refused_before_anything_is_released() -> None:
    run = private(model=linear())
    before, scaler = weights(run), torch.amp.GradScaler("cpu")
    batch = first_batch(run)
    scaler.scale(loss(run, batch)).backward()
    with pytest.raises(TrainingError, match="GradScaler must not be used"):
        scaler.step(run.optimizer)
    assert np.array_equal(weights(run), before)


def test_the_original_optimizer_makes_no_steps() -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = make_private(model, optimizer, dataset(), MECHANISM, noise_multiplier=1.0, max_grad_norm=1.0)
    before = weights(run)
    loss(run, first_batch(run)).backward()
    with pytest.raises(TrainingError, match="would follow gradients without noise"):
        optimizer.step()
    assert np.array_equal(weights(run), before)


# A batch in several parts, by the loop itself.


def test_parts_make_the_same_model() -> None:
    whole, split = private(model=linear()), private(model=linear())
    train(whole, N)
    while split.steps_left:
        for x, y in split.data_loader:
            split.optimizer.zero_grad()
            for part in range(0, len(x), 2):
                loss(split, (x[part : part + 2], y[part : part + 2])).backward()
                if part + 2 < len(x):
                    split.optimizer.sum_part()
                    split.optimizer.zero_grad()
            if not len(x):
                loss(split, (x, y)).backward()
            split.optimizer.step()
    np.testing.assert_allclose(weights(split), weights(whole), atol=1e-5)


@pytest.mark.parametrize(("used", "message"), [((2, 0), "it has 2"), ((3, 1), "it has 4"), ((3,), None)])
def test_parts_must_be_the_whole_batch(used: tuple[int, ...], message: str | None, tmp_path: Path) -> None:
    run = private(model=linear())
    x, y = next(batch for batch in run.data_loader if len(batch[0]) == 3)
    run.noise._step = run.current.part[0]  # as if the batches before had been used
    *parts, last = used
    with pytest.raises(TrainingError, match=message) if message else _nothing():
        for size in parts:
            loss(run, (x[:size], y[:size])).backward()
            run.optimizer.sum_part()
            with pytest.raises(TrainingError, match="after a whole batch"):
                run.save(tmp_path / "c")
        if last:
            loss(run, (x[:last], y[:last])).backward()
        run.optimizer.step()


def _nothing() -> Any:
    return pytest.MonkeyPatch.context()


# Models: names, copies, compilation, a second run.


def test_names_are_those_of_the_model(tmp_path: Path) -> None:
    run, other = private(model=linear()), linear()
    train(run, 2)
    state = run.model.state_dict()
    assert list(state) == list(other.state_dict())
    other.load_state_dict(state)
    copied = copy.deepcopy(run.model)  # an ordinary module, without hooks
    assert type(copied) is type(other)
    x = torch.randn(4, 1, 6, 6)
    assert torch.equal(copied(x), other(x))
    copied(x).sum().backward()
    run.model.load_state_dict({f"_module.{name}": torch.zeros_like(value) for name, value in state.items()})
    assert not weights(run).any()
    run.model.load_state_dict(state)
    train(run, 2)


def test_one_model_belongs_to_one_run() -> None:
    run = private(model=linear())
    train(run, 1)
    for again in (run.model, run.model._module):
        with pytest.raises(ArgumentError, match="must not belong to a private run already"):
            private(model=again)
    with pytest.raises(ArgumentError, match="optimizer must be an ordinary one"):
        make_private(linear(), run.optimizer, dataset(), MECHANISM, noise_multiplier=1.0, max_grad_norm=1.0)
    compiled = linear()
    compiled._orig_mod = linear()  # what torch.compile leaves, without the seconds that it takes to import
    with pytest.raises(ArgumentError, match="model must not be compiled"):
        private(model=compiled)
    plain = run.unwrap()
    with pytest.raises(TrainingError, match="step 1 has no gradients"):
        train(run, 1)
    train(private(model=plain), 2)


# Accountants and the privacy spent.


@pytest.mark.parametrize("target", [{"noise_multiplier": 1.0}, {"target_epsilon": 1.0, "target_delta": 1e-5}])
def test_an_accountant_that_only_estimates_is_refused_at_once(target: dict[str, float]) -> None:
    with pytest.raises(ArgumentError, match="accountant must be one that proves its bound, monte-carlo only estimates"):
        private(accountant="monte-carlo", **{"noise_multiplier": None, **target})


def test_what_takes_long_is_announced(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with _target.saying("being quick"):
        pass
    assert not capsys.readouterr().err
    monkeypatch.setattr(_target, "_SILENCE", 0.0)
    with _target.saying("calibrating"):
        time.sleep(0.05)
    assert capsys.readouterr().err.startswith("dpmf: calibrating ...\ndpmf: calibrating took")
