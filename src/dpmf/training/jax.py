"""Private training in JAX: batches, clipped gradients and noise that belong together, as pure functions of one state.

    private = dpmf.training.jax.make_private(mechanism, records=n, clip_norm=1.0, target_epsilon=8.0, target_delta=1e-5)
    gradient = private.gradient(loss)  # of a function loss(weights, record)
    optimizer = optax.chain(private.noise, optax.adam(1e-3))
    state = optimizer.init(weights)

    @jax.jit
    def step(weights, state):
        clipped = gradient(weights, data, private.batch(state))
        updates, state = optimizer.update(clipped, state, weights)
        return optax.apply_updates(weights, updates), state

The state of the optimizer holds everything that a run is resumed from: the keys of batches and noise, the step, and the
noise that is kept. A step is a function of it, for `jax.jit` and `jax.lax.scan`.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import os
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dpmf import api, validation
from dpmf.batching import description
from dpmf.cut import Cut
from dpmf.errors import ArgumentError, TrainingError
from dpmf.mechanism import Mechanism, strategy_digest
from dpmf.paper import Statement
from dpmf.run import checked_stops, only_mechanism
from dpmf.training import checkpoint
from dpmf.training._jax_noise import GENERATOR, REACH, Rows, installed, precision
from dpmf.training._jax_sums import Grid, exact_sums, parts, with_noise
from dpmf.training._jax_trees import packed, unpacked
from dpmf.training._schedule import Schedule
from dpmf.training._sources import new_key
from dpmf.training._tails import check_reach
from dpmf.training._target import Guarantee, noise_for
from dpmf.training.journal import Journal
from dpmf.training.sampler import BatchSampler

__all__ = ["Batch", "Private", "State", "make_private"]

_PURPOSES = ("noise", "bins", "groups", "loss")  # each has a key of its own
_AT_ONCE = 2**26  # elements of the gradients of records that are in memory together, a quarter of a gibibyte
_SMALL_SHARE = 2.0**-10  # of δ, for batches whose size is chosen here


class State(NamedTuple):
    """What a run is resumed from, as arrays. It is as secret as the data.

    Attributes:
      identity: a digest of the mechanism, the data's size and the settings. With another one, updates are NaN: a state
        goes on only with what it began with.
      keys: those of the noise, of bins, of groups and of what the loss draws, two words each.
      step: the number of steps made so far.
      kept: what is kept of past noise.
    """

    identity: Any
    keys: Any
    step: Any
    kept: Any


class Batch(NamedTuple):
    """The records of one step, in arrays of one shape for all steps.

    Attributes:
      indices: of records; some record where there is none. With users, one row for each.
      real: where there is a record.
      key: of what the loss draws in this step, two words.
    """

    indices: Any
    real: Any
    key: Any


class Private:
    """Batches and noise of a private run, as functions that can be compiled. `make_private` makes it.

    Attributes:
      run: everything that the guarantee depends on.
      mechanism: strategy and batching.
      noise_multiplier: σ for clipping norm 1 and the strategy as given.
      clip_norm: the norm to which the gradient of a record (or user) is clipped.
      expected_batch_size: what sums are divided by.
      cut: what it costs in δ that longer batches are cut.
      relation: how two data sets may differ that the guarantee compares, in words.
      calibration: how σ was found, if it was calibrated.
    """

    def __init__(
        self,
        sampler: BatchSampler,
        guarantee: Guarantee,
        dtype: Any,
    ):
        self._jax, self._guarantee, run = installed(), guarantee, guarantee.run
        assert run.cut is not None
        self.run, self.mechanism, self.cut, self.relation = run, run.mechanism, run.cut, run.relation
        self.noise_multiplier, self.clip_norm = run.noise_multiplier, run.clip_norm
        self.expected_batch_size = sampler.expected_batch_size
        self.calibration = guarantee.calibration
        self.journal = Journal()
        self._schedule, self._grid = Schedule.of(run.mechanism.batching), Grid.of(run)
        self._rows = Rows(run.mechanism, run.noise_multiplier * run.clip_norm / self._grid.unit, dtype)
        self._records, self._balls, self._units, self._dtype = sampler.size, sampler.balls, sampler.units, dtype
        hashes = (hashlib.sha256(f"dpmf JAX {purpose}".encode() + sampler.key).digest()[:8] for purpose in _PURPOSES)
        self._keys = np.stack([np.frombuffer(one, dtype="<u4") for one in hashes]).astype(np.uint32)

    @property
    def steps(self) -> int:
        """How many steps there are."""
        return self._schedule.steps

    @property
    def max_batch_size(self) -> int:
        """The number of rows of every batch."""
        return self.cut.max_batch_size

    @cached_property
    def _identity(self) -> np.ndarray[Any, Any]:
        batching = self.mechanism.batching
        parts = (
            strategy_digest(self.mechanism.strategy, batching.iterations),
            sorted(description(batching).items(), key=lambda item: item[0]),
            self._balls,
            None if self._units is None else self._units.digest,
            (self.noise_multiplier, self.clip_norm, self.expected_batch_size, self.max_batch_size, str(self._dtype)),
            self._grid.bits,
            GENERATOR,
        )
        return np.frombuffer(hashlib.sha256(repr(parts).encode()).digest()[:16], dtype="<u4").astype(np.uint32)

    def _probe(self, state: State) -> np.ndarray[Any, Any]:
        """Bits drawn from the state's keys: they show whether this version of JAX still draws those of a checkpoint."""
        return np.stack([np.asarray(self._jax.random.bits(key, (4,))) for key in state.keys])

    @property
    def noise(self) -> Any:
        """The optax transformation that adds the noise of the next step, for the front of an `optax.chain`.

        It takes what `gradient` returns, divides by the expected batch size, and returns updates in the precision of
        the parameters, where `update` is given those.

        **Formal guarantees.** With `batch` and `gradient` the outputs are those of the mechanism: sums are exact, noise
        is rounded to their grid, and the result is a function of both together, rounded to the precision of the
        parameters at the very end. A state must be used once: two different updates from one state have the same noise.
        Compiled code cannot raise: after the last step, and with a state of other settings, the result is NaN, so that
        nothing is released.
        """
        import optax

        jax, numpy = self._jax, self._jax.numpy

        def init(parameters: Any) -> State:
            kept = self._rows.begin(self._rows.zeros(parameters))
            return State(numpy.asarray(self._identity), numpy.asarray(self._keys), numpy.int32(0), kept)

        def update(sums: Any, state: State, parameters: Any = None) -> tuple[Any, State]:
            for leaf in jax.tree.leaves(sums):
                if numpy.result_type(leaf).name != "int32" or numpy.shape(leaf)[:1] != (2,):
                    raise ArgumentError("updates", "must be what gradient() returned: sums on a grid, as integers")
            like = jax.tree.map(lambda s: s[0].astype(numpy.float32), sums) if parameters is None else parameters
            zero = self._rows.zeros(like)
            noise, kept = self._rows.next(state.keys[0], state.step, state.kept, zero)
            mine = (state.identity == self._identity).all() & (state.step < self.steps)

            def released(one: Any, row: Any, leaf: Any) -> Any:
                noisy = with_noise(one, row, self._grid, self.expected_batch_size)
                return numpy.where(mine, noisy, numpy.nan).astype(numpy.result_type(leaf))

            noisy = jax.tree.map(released, sums, noise, like)
            return noisy, state._replace(step=state.step + 1, kept=kept)

        return optax.GradientTransformation(init, update)

    def state(self, tree: Any) -> State:
        """The one `State` in a tree, such as the state of an `optax.chain`."""
        found = [
            leaf
            for leaf in self._jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, State))
            if isinstance(leaf, State)
        ]
        if len(found) != 1:
            raise ArgumentError("state", f"must hold one state of the noise, this tree has {len(found)}")
        return found[0]

    def batch(self, tree: Any) -> Batch:
        """The batch of the next step.

        Args:
          tree: the state, or a tree that it is in.

        **Formal guarantees.** Those of `BatchSampler`: bins are independent and uniform, up to the quality of JAX's
        generator, and a bin is cut to its first `max_batch_size` records or users.
        """
        numpy, state, schedule = self._jax.numpy, self.state(tree), self._schedule
        draw, place = numpy.divmod(state.step, schedule.per_draw)
        key = self._jax.random.fold_in(state.keys[3], state.step)
        inside = self._bins(state.keys, draw) == place % schedule.per_epoch
        (chosen,) = numpy.nonzero(inside, size=self.max_batch_size, fill_value=self._balls)
        if self._units is None:
            return Batch(numpy.where(chosen < self._balls, chosen, 0), chosen < self._balls, key)
        rows = numpy.asarray(self._units.table)[chosen]
        # A user is filled up with records of its own: 0 times the gradient of another user's could be NaN.
        return Batch(numpy.where(rows < 0, numpy.maximum(rows[:, :1], 0), rows), rows >= 0, key)

    def _bins(self, keys: Any, draw: Any) -> Any:
        """The bin of every record or user in one draw."""
        numpy, random, groups = self._jax.numpy, self._jax.random, self._schedule.groups
        within = random.randint(random.fold_in(keys[1], draw), (self._balls,), 0, self._schedule.per_epoch // groups)
        if groups == 1:
            return within
        runs = -(-self._balls // groups)
        drawn = random.bits(keys[2], (runs, groups))
        return groups * within + numpy.argsort(drawn, axis=1).ravel()[: self._balls]

    def gradient(self, loss: Callable[..., Any]) -> Callable[[Any, Any, Batch], Any]:
        """A function of (parameters, data, batch): the sum of clipped gradients, which `noise` takes.

        Args:
          loss: a function of (parameters, record) for one record, which is `data` without its first dimension, or of
            (parameters, record, key) if it draws: for dropout, say. With users, the mean over a user's records is
            clipped as a whole.

        Returns:
          A function that can be compiled; `data` is a tree of arrays with one row for each of the rows of the run. Its
          result has two integers for every element of the parameters.

        **Formal guarantees.** Gradients are taken in single precision. One record (or user) contributes a vector that
        is at most clip_norm long, exactly, if the loss is a function of its arguments alone, and sums are exact
        (`exact_sums`). The key is a function of the run's secret key, the step and the record's number. So what the
        loss draws for the other records is the same with and without this one, and independent of noise and bins: given
        all that is drawn, the outputs are those of the mechanism, and a mixture of (ε, δ)-DP mechanisms with the same
        weights for both data sets is (ε, δ)-DP (docs/theory/randomness.md). A gradient that is not finite counts as
        zero. All batches have one shape, so that a record does not change how those of others are computed, up to what
        docs/theory/floating-point.md names as an assumption.
        """
        jax, numpy = self._jax, self._jax.numpy
        needed = [one for one in inspect.signature(loss).parameters.values() if one.default is one.empty]
        draws = len([one for one in needed if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]) == 3

        def of_record(parameters: Any, record: Any, words: Any) -> Any:
            return loss(parameters, record, *([jax.random.wrap_key_data(words, impl="threefry2x32")] if draws else []))

        def one(parameters: Any, record: Any, real: Any, words: Any) -> Any:
            if self._units is None:
                return of_record(parameters, record, words)
            losses = jax.vmap(of_record, (None, 0, 0))(parameters, record, words)
            return numpy.where(real, losses, 0).sum() / numpy.maximum(real.sum(), 1)

        def gradient(parameters: Any, data: Any, batch: Batch) -> Any:
            jax.tree.map(precision, parameters)  # others are refused
            for array in jax.tree.leaves(data):
                if (shape := numpy.shape(array))[:1] != (self._records,):
                    raise ArgumentError(
                        "data", f"must have a row for each of the {self._records} records in every array, got {shape}"
                    )
            sizes = [math.prod(numpy.shape(leaf)) for leaf in jax.tree.leaves(parameters)]
            rounds = min(-(-len(batch.indices) * sum(sizes) // _AT_ONCE), len(batch.indices))
            each = -(-len(batch.indices) // rounds)
            each += -each % parts(each)
            more = rounds * each - len(batch.indices)  # so many rows of nobody
            indices, real = (numpy.pad(x, ((0, more), *((0, 0),) * (x.ndim - 1))) for x in (batch.indices, batch.real))

            def some(j: Any) -> Any:
                chosen, there = (x.reshape(each, rounds, *x.shape[1:])[:, j] for x in (indices, real))
                words = jax.vmap(jax.random.fold_in, (None, 0))(batch.key, chosen.ravel()).reshape(*chosen.shape, 2)
                records = jax.tree.map(lambda array: numpy.asarray(array)[chosen], data)
                gradients = jax.vmap(jax.grad(one), (None, 0, 0, 0))(parameters, records, there, words)
                return exact_sums(gradients, there if self._units is None else there.any(axis=1), self._grid)

            if rounds == 1:
                return some(0)
            none = jax.tree.map(lambda leaf: numpy.zeros((2, *numpy.shape(leaf)), numpy.int32), parameters)
            return jax.lax.fori_loop(0, rounds, lambda j, sums: jax.tree.map(numpy.add, sums, some(j)), none)

        return gradient

    def get_epsilon(self, delta: float, stop: int | None = None) -> float:
        """An ε for which the whole run is (ε, delta)-DP, with the cost of batches that are cut.

        Args:
          delta: δ. One that is below what cut batches cost is refused.
          stop: a stopping point that was named in advance, for the ex-post ε of stopping there.

        **Formal guarantees.** Those of `make_private`, wherever the run stops: the ε of a part of the steps would hold
        only for a number of steps that was chosen in advance, whatever the models look like.
        """
        return self._guarantee.bound(validation.probability("delta", delta), stop).epsilon

    def statement(self, delta: float | None = None) -> Statement:
        """What holds of this run: `str()` is a paragraph, `to_dict()` one JSON object.

        Args:
          delta: at which δ; by default the target's, or 10⁻⁵ without a target.

        **Formal guarantees.** Those of `get_epsilon`.
        """
        return self._guarantee.statement(delta)

    def save(self, path: str | os.PathLike[str], tree: Any) -> None:
        """Write a checkpoint of a tree that holds the state, with the journal of the run beside it.

        Args:
          path: the file, which is replaced atomically. It is as secret as the data.
          tree: any tree of arrays, such as ``(weights, optimizer_state)``.
        """
        state = self.state(tree)
        step, target = int(state.step), Path(path)
        content = {
            "run": self.journal.run,
            "step": step,
            "identity": self._identity,
            "probe": self._probe(state),
            "tree": packed(self._jax, tree),
        }
        self.journal.begin(target, step)
        checkpoint.save(target, content)
        self.journal.saved(step)

    def load(self, path: str | os.PathLike[str], like: Any, *, allow_second_continuation: bool = False) -> Any:
        """Read a checkpoint of the same mechanism, settings and model; the run goes on with the same bits.

        A checkpoint is loaded once. It is refused if it was loaded before, if the run has saved a later one, or if its
        journal is not beside it: two continuations with different results would have the same noise. What was computed
        after the last checkpoint, before a crash, is computed again, and must be computed by the same code.

        The journal knows of saving and loading only, since steps are compiled. A process that goes on after saving
        learns that another one has loaded its checkpoint when it saves again, and raises `TrainingError` then.
        Copies of a checkpoint in other directories are not noticed, nor is a state that is used twice without `load`.

        Args:
          path: the checkpoint.
          like: a tree like the one that was saved; only its structure, shapes and precisions are used.
          allow_second_continuation: continue nevertheless. Only set this if nothing that was computed after the
            checkpoint has been or will be shown to anybody.
        """
        allow = validation.flag("allow_second_continuation", allow_second_continuation)
        content = checkpoint.load(path)
        try:
            run, step, saved = (content[name] for name in ("run", "step", "tree"))
            identity, probe = content["identity"], content["probe"]
        except (KeyError, TypeError) as error:
            raise ValueError(f"checkpoint must be one that save() wrote, {path} has no {error}") from None
        if not np.array_equal(identity, self._identity):
            raise ValueError(
                f"checkpoint must be of this mechanism, these settings and this generator of noise, {path} is of others"
            )
        tree = unpacked(self._jax, saved, like, path)
        state = self.state(tree)
        if int(state.step) != step:
            raise ValueError(f"checkpoint must hold batches and noise of one run at one step, {path} does not")
        if not np.array_equal(probe, self._probe(state)):
            raise TrainingError(
                f"{path} must be continued with the generator that made it; this version of JAX differs"
            )
        journal = Journal.resume(Path(path), run, step, allow=allow, writes=True, once=True)
        journal.resumed()
        self.journal = journal
        return tree


def make_private(
    mechanism: Mechanism,
    *,
    records: int,
    rows: int | None = None,
    clip_norm: float,
    target_epsilon: float | None = None,
    target_delta: float | None = None,
    noise_multiplier: float | None = None,
    accountant: api.AnyAccountant = api.DEFAULT_ACCOUNTANT,
    expected_batch_size: float | None = None,
    max_batch_size: int | None = None,
    unit: Any = None,
    stopping_points: Sequence[int] = (),
    seed: int | None = None,
    dtype: Any = None,
) -> Private:
    """Batches, clipped gradients and noise of a mechanism, for compiled steps in JAX.

    Args:
      mechanism: strategy and batching.
      records: a public upper bound on the number of records (or users), a rounded number, say. Everything that the
        guarantee is stated with comes from it.
      rows: the length of every array of `data`, which is private. By default `records`, or with `unit` its length.
      clip_norm: the norm to which the gradient of a record (or user) is clipped.
      target_epsilon: the ε for which the noise is calibrated; `target_delta` must be given with it.
      target_delta: the δ for which the noise is calibrated.
      noise_multiplier: the noise itself, for clipping norm 1 and the strategy as given, instead of a target.
      accountant: the accountant that calibrates. One that only estimates is refused.
      expected_batch_size: a public constant by which sums are divided, in place of records/b. With `unit` it counts
        users.
      max_batch_size: the number of rows of every batch. A bin with more records (or users) is cut, and the probability
        of that is charged to δ. By default it is so large that this takes a thousandth of δ; with a noise multiplier
        in place of a target it must be given.
      unit: for every record the user it belongs to. Users are thrown into bins then, and the guarantee is for users in
        place of records.
      stopping_points: steps, named in advance, after which one may stop with a smaller ε. δ is divided over them.
      seed: an integer that makes an experiment repeatable. By default batches and noise are drawn from a secret of the
        operating system.
      dtype: "float64" draws the noise in double precision, where JAX has that enabled. By default it is drawn in single
        precision, and in double precision for parameters that have it. Parameters may be bfloat16 or float16.

    Returns:
      A `Private`, whose `noise` is the front of an `optax.chain` and whose `batch` and `gradient` make a step.

    **Formal guarantees.** If every step takes the batch of the state, adds the noise to its gradient once and goes on
    with the new state, what is released is (ε, δ)-DP for adding or removing a record (or user); where records are split
    into groups (strides, cyclic Poisson sampling), for leaving the place of one empty (`relation`). The outputs are
    those of the mechanism, except where bins are cut, which is charged (docs/theory/batch-sizes.md). This assumes that
    the loss is a function of the parameters, one record and the key that `gradient` hands over, and of nothing that
    depends on other records. JAX's threefry, with a 64-bit key, draws batches, noise and the keys of the loss.
    """
    only_mechanism(mechanism)
    installed()
    precision(np.zeros(1, dtype="float32"), dtype)
    clip = validation.positive("clip_norm", clip_norm)
    most = validation.integer("records", records, at_least=1)
    if rows is None:
        rows = len(unit) if hasattr(unit, "__len__") else most
    if max_batch_size is None:
        if target_epsilon is None or target_delta is None:
            raise ArgumentError(
                "max_batch_size", "must be given with noise_multiplier: all batches have this many rows"
            )
        epsilon = validation.positive("target_epsilon", target_epsilon)
        delta = validation.probability("target_delta", target_delta)
        share = _SMALL_SHARE / (len(stopping_points) + 1)
        max_batch_size = Cut(mechanism.batching, most, 1).smallest(epsilon, delta, share)
    # The sampler for loops checks the arguments that both have in common. It draws no batches here.
    sampler = BatchSampler(
        validation.integer("rows", rows, at_least=1), mechanism, seed=new_key(seed), records=most, unit=unit,
        expected_batch_size=expected_batch_size, max_batch_size=max_batch_size,
    )  # fmt: skip
    stops = checked_stops(stopping_points, sampler.steps)
    sigma, calibration, proved = noise_for(
        mechanism, target_epsilon, target_delta, noise_multiplier, accountant, cut=sampler.cut, ways=len(stops) + 1
    )
    fine = dtype is not None and np.dtype(dtype) == np.float64
    precision_ = "float32, with noise in float64" if fine else "float32"
    run = sampler.run(mechanism, sigma, clip, precision=precision_, stops=stops)
    private = Private(sampler, Guarantee(run, accountant, calibration, proved), dtype)
    check_reach(mechanism, sigma, REACH, 2.0**40)  # parameters, of which any model has fewer
    return private
