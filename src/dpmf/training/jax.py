"""JAX: a run's batches and noise in one object that can be saved and resumed; jax-privacy clips and adds the noise.

    run = dpmf.training.jax.PrivateTraining(
        mechanism, weights, records=n, noise_multiplier=σ, l2_sensitivity=gradient.sensitivity()
    )
    for batch in run.batches():
        clipped = gradient(weights, x[batch], y[batch])
        updates, optimizer_state = optimizer.update(run.add_noise(clipped), optimizer_state)
        weights = optax.apply_updates(weights, updates)
        run.save("checkpoint", (weights, optimizer_state))

Batches and noise belong together: a resumed run that drew other batches, or other noise, would not be what was
accounted for. `privatizer` is the noise alone, as an optax transformation, for those who keep track of its state
themselves.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterator
from typing import Any

import numpy as np

from dpmf import errors, validation
from dpmf.errors import TrainingError
from dpmf.mechanism import Mechanism
from dpmf.strategies.base import ToeplitzStrategy
from dpmf.strategies.inversion import covering_inverse
from dpmf.strategies.streaming import Plan, make_plan
from dpmf.training._resumable import Resumable
from dpmf.training._schedule import Schedule
from dpmf.training._sources import new_key
from dpmf.training.journal import Journal
from dpmf.training.sampler import BatchSampler, IndexArray


class PrivateTraining(Resumable):
    """The batches and the noise of one training run.

    Args:
      mechanism: strategy and batching.
      parameters: what is trained, a tree of arrays. The noise has its structure and shapes.
      records: the number of records.
      noise_multiplier: σ for sensitivity 1 and the strategy as given.
      l2_sensitivity: by how much one record can change the gradient in one iteration: the clipping norm divided by the
        *expected* batch size. `clipped_grad(...).sensitivity()` knows it.
      seed: an integer that makes an experiment repeatable. By default batches and noise are drawn from a secret of the
        operating system.
      source: the generator of the batches, "fast" or "secure". The noise is JAX's threefry with a 64-bit key.
      dtype: the precision of the noise; by default that of the gradients.

    **Formal guarantees.** What `add_noise` returns are the outputs of the mechanism: batches are those of the
    mechanism's batching (see `BatchSampler`), and the noise is noise_multiplier × l2_sensitivity × C⁻¹Z with C the
    strategy as given, where the first step after a gap adds the noise of the gap too.
    `add_noise` is accepted once for every batch, in order; otherwise `TrainingError` is raised. A run restored with
    `load` goes on with the same batches and the same noise.
    """

    def __init__(
        self,
        mechanism: Mechanism,
        parameters: Any,
        *,
        records: int,
        noise_multiplier: float,
        l2_sensitivity: float,
        seed: int | None = None,
        source: str = "fast",
        dtype: Any = None,
    ):
        self._jax = _jax_privacy()[0]
        self.mechanism = _checked(mechanism)
        self.noise_multiplier = validation.positive("noise_multiplier", noise_multiplier)
        self.l2_sensitivity = validation.positive("l2_sensitivity", l2_sensitivity)
        self.sampler = BatchSampler(records, mechanism, seed=(key := new_key(seed)), source=source)
        self.journal = Journal()
        self._parameters, self._dtype = parameters, dtype
        self._step = 0
        self._delivered: int | None = None  # the batch that has been taken and not been used yet
        self._set_key(key)

    def _set_key(self, key: bytes) -> None:
        jax = self._jax
        words = np.frombuffer(hashlib.sha256(b"dpmf JAX noise" + key).digest()[:8], dtype="<u4").astype(np.uint32)
        transformation = privatizer(
            self.mechanism,
            noise_multiplier=self.noise_multiplier,
            l2_sensitivity=self.l2_sensitivity,
            prng_key=jax.random.wrap_key_data(jax.numpy.asarray(words), impl="threefry2x32"),
            dtype=self._dtype,
        )
        self._key = key
        self._update = jax.jit(transformation.update)
        self._state = transformation.init(self._parameters)

    @property
    def step(self) -> int:
        """The number of steps made so far."""
        return self._step

    @property
    def expected_batch_size(self) -> float:
        """n/b, by which the sum of clipped gradients is divided. The actual size of a batch depends on the data."""
        return self.sampler.expected_batch_size

    def batches(self) -> Iterator[IndexArray]:
        """The batches from the current step to the last one, as arrays of indices of records; some may be empty.

        Returns:
          An iterator. Call `add_noise` exactly once between two batches.
        """
        while (step := self._step) < self.sampler.steps:
            self._delivered = step
            yield self.sampler.batch(step)
            if self._step == step:
                raise TrainingError(
                    f"batch {step} was left out: call add_noise once on every batch, empty ones included"
                )

    def add_noise(self, clipped: Any) -> Any:
        """Add the noise of the current step to the sum of clipped gradients.

        Args:
          clipped: the sum of the clipped gradients of the last batch, divided by the expected batch size.

        Returns:
          The noisy gradient, which may be released.
        """
        if self._delivered != self._step:
            raise TrainingError(
                f"step {self._step} must be made on batch {self._step}, which batches() has not returned yet: "
                "call add_noise once on every batch"
            )
        noisy, state = self._update(clipped, self._state)
        # The noise of this step must not be added to anything else, whatever happens from here on.
        self._state, self._step, self._delivered = state, self._step + 1, None
        if self.journal.files:
            self.journal.release(self._step - 1, _digest(noisy))
        return noisy

    def _identity(self) -> dict[str, Any]:
        leaves = self._jax.tree.leaves(self._parameters)
        return {
            "l2_sensitivity": self.l2_sensitivity,
            "shapes": [list(np.shape(leaf)) for leaf in leaves],
            "dtype": str(self._dtype),
        }

    def save(self, path: str | os.PathLike[str], model: Any = ()) -> None:
        """Write a checkpoint: batches, noise, and what belongs to the model.

        The journal of the run is kept in the same directory. The file is as secret as the data.

        Args:
          path: the file, which is replaced atomically.
          model: any tree of arrays, such as ``(weights, optimizer_state)``.
        """
        if self._delivered == self._step:
            raise TrainingError("a checkpoint can only be written after add_noise, not between a batch and its noise")
        noise = {"key": self._key.hex(), "step": self._step, "state": self._packed(self._state)}
        self._write(path, noise, {"model": self._packed(model)})

    def load(self, path: str | os.PathLike[str], model: Any = (), *, allow_second_continuation: bool = False) -> Any:
        """Continue from a checkpoint of the same mechanism, data and model.

        Steps that were made after the checkpoint, before a crash, say, are made again. They must give the same bits as
        before, or `TrainingError` is raised: a second continuation with other results has the same noise as the first
        one, and the difference of both shows gradients without noise. For the same reason a checkpoint is refused if
        the run has saved a later one, or if the run's journal is not beside it.

        Args:
          path: the checkpoint.
          model: a tree like the one that was saved; only its structure, shapes and precisions are used.
          allow_second_continuation: continue nevertheless. Only set this if nothing that was computed after the
            checkpoint has been or will be shown to anybody: the guarantee does not cover both continuations.

        Returns:
          The model as it was saved.
        """
        allow = validation.flag("allow_second_continuation", allow_second_continuation)
        state, journal = self._read(path, ("model",), allow=allow, writes=True)
        noise = state["noise"]
        at = validation.integer("step", noise["step"], at_least=0, at_most=self.sampler.steps)
        noise_state = self._unpacked(noise["state"], self._state, path)
        restored = self._unpacked(state["model"], model, path)
        journal.resumed()
        self.sampler.load_state_dict(state["sampler"])
        self._set_key(bytes.fromhex(noise["key"]))
        self._state, self._step, self._delivered, self.journal = noise_state, at, None, journal
        return restored

    def _packed(self, tree: Any) -> list[Any]:
        """The leaves of a tree as arrays that a checkpoint can hold."""
        return [_bits(self._jax, leaf) for leaf in self._jax.tree.leaves(tree)]

    def _unpacked(self, saved: Any, like: Any, path: Any) -> Any:
        jax = self._jax
        leaves, structure = jax.tree.flatten(like)
        mine = [_bits(jax, leaf) for leaf in leaves]
        if [(a.shape, a.dtype) for a in map(np.asarray, saved)] != [(a.shape, a.dtype) for a in mine]:
            raise ValueError(f"checkpoint must be of a model like this one, {path} has other shapes or precisions")
        restored = []
        for array, leaf in zip(saved, leaves, strict=True):
            if _is_key(jax, leaf):
                restored.append(jax.random.wrap_key_data(jax.numpy.asarray(array), impl=jax.random.key_impl(leaf)))
            else:
                value = jax.numpy.asarray(np.asarray(array).view(np.asarray(leaf).dtype))
                # What is spread over several devices now stays so, however many devices it was saved from.
                spread = isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1
                restored.append(jax.device_put(value, leaf.sharding) if spread else value)
        return jax.tree.unflatten(structure, restored)


def _is_key(jax: Any, leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _bits(jax: Any, leaf: Any) -> np.ndarray[Any, Any]:
    """A leaf as a numpy array: the data of a random key, and types that numpy does not know as integers."""
    array = np.asarray(jax.random.key_data(leaf) if _is_key(jax, leaf) else leaf)
    return array.view(f"u{array.itemsize}") if array.dtype.kind == "V" else array


def _digest(tree: Any) -> str:
    """A short digest of noisy gradients: it tells different results of one step apart."""
    import jax

    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        digest.update(np.ascontiguousarray(_bits(jax, leaf)).tobytes())
    return digest.hexdigest()[:16]


def privatizer(
    mechanism: Mechanism,
    *,
    noise_multiplier: float,
    l2_sensitivity: float,
    prng_key: Any = None,
    dtype: Any = None,
) -> Any:
    """The optax transformation that adds noise_multiplier × l2_sensitivity × the next row of C⁻¹Z, once per batch.

    The first step after a gap between throws adds the sum of its own row and of those of the gap.

    Args:
      mechanism: strategy and batching.
      noise_multiplier: σ for sensitivity 1 and the strategy as given.
      l2_sensitivity: by how much one record can change the gradient in one iteration: the clipping norm divided by the
        *expected* batch size. `clipped_grad(...).sensitivity()` knows it.
      prng_key: a JAX key, or an integer that makes an experiment repeatable. By default a secret of the operating
        system. Whoever resumes a run must give the key it began with: the state does not hold it for every strategy.
      dtype: the precision of the noise; by default that of the gradients.

    Returns:
      An optax transformation. Its state, the key and the assignment of records to batches belong together;
      `PrivateTraining` saves and restores all of them.

    **Formal guarantees.** The rows are those of C⁻¹Z with C the strategy as given; jax-privacy's own column
    normalisation is not used. Compiled code cannot raise: after the last step the result is NaN, so that nothing more
    is released.
    """
    jax, noise_addition = _jax_privacy()
    _checked(mechanism)
    import jax.numpy as jnp
    import optax

    sigma = validation.positive("noise_multiplier", noise_multiplier)
    sensitivity = validation.positive("l2_sensitivity", l2_sensitivity)
    schedule = Schedule.of(mechanism.batching)
    plan = make_plan(mechanism.strategy, mechanism.batching.iterations)
    if prng_key is None:
        # jax.random.key would use only 32 bits of a seed.
        prng_key = jax.random.wrap_key_data(jnp.array([secrets.randbits(32) for _ in (0, 1)], dtype=jnp.uint32))
    inner = noise_addition.matrix_factorization_privatizer(
        _noising_matrix(mechanism, plan), stddev=sigma * sensitivity * plan.scale, prng_key=prng_key, dtype=dtype
    )

    def init(parameters: Any) -> Any:
        return jnp.zeros((), dtype=jnp.int32), inner.init(parameters)

    def update(sum_of_clipped_grads: Any, state: Any, params: Any = None) -> Any:
        count, noise = state
        noisy, noise = inner.update(sum_of_clipped_grads, noise, params)
        if schedule.gap:  # the first step after a gap adds the rows of the gap too
            after = (count > 0) & (count % schedule.per_draw == 0)
            noisy, noise = jax.lax.fori_loop(
                0, jnp.where(after, schedule.gap, 0), lambda _, both: inner.update(*both, params), (noisy, noise)
            )
        allowed = count < schedule.steps
        return jax.tree.map(lambda g: jnp.where(allowed, g, jnp.nan).astype(g.dtype), noisy), (count + 1, noise)

    return optax.GradientTransformation(init, update)


def _jax_privacy() -> tuple[Any, Any]:
    try:
        import jax
        from jax_privacy import noise_addition
    except ImportError:
        raise errors.missing_extra("jax-privacy", "jax", "training with JAX") from None
    return jax, noise_addition


def _checked(mechanism: Mechanism) -> Mechanism:
    if not isinstance(mechanism, Mechanism):
        raise validation.wrong("mechanism", "a dpmf.Mechanism", mechanism)
    return mechanism


def _noising_matrix(mechanism: Mechanism, plan: Plan) -> Any:
    """C⁻¹ (up to the plan's scale) as jax-privacy takes it: streaming where the plan streams, dense otherwise."""
    import jax.numpy as jnp
    from jax_privacy.matrix_factorization import streaming_matrix, toeplitz

    if plan.method == "regeneration" or not (
        plan.method == "buffers" or isinstance(mechanism.strategy, ToeplitzStrategy)
    ):
        inverse = covering_inverse(mechanism.strategy, mechanism.batching.iterations)
        return jnp.asarray(inverse / plan.scale)
    if plan.copies == 0:
        first = float(plan.weights[0, 0])
        return streaming_matrix.diagonal(jnp.array([first if plan.method == "convolution" else 1.0 / first]))
    if plan.method == "back-substitution":
        return toeplitz.inverse_as_streaming_matrix(jnp.asarray(plan.weights[0]))
    kept = plan.copies

    def start(value: Any) -> Any:
        zero = jnp.zeros_like(value)
        return jnp.broadcast_to(zero, (kept, *zero.shape))

    weights = np.asarray(plan.weights)

    def convolve(z: Any, past: Any) -> Any:
        row = weights[0]
        out = z * row[0] + jnp.tensordot(jnp.asarray(row[1:], z.dtype), past, axes=1)
        return out, jnp.roll(past, 1, axis=0).at[0].set(z)

    def drain(z: Any, buffers: Any) -> Any:
        decay, weight = (jnp.asarray(row, z.dtype) for row in weights)
        out = z - jnp.tensordot(weight, buffers, axes=1)
        return out, buffers * decay.reshape(-1, *(1,) * out.ndim) + out

    following = convolve if plan.method == "convolution" else drain
    return streaming_matrix.StreamingMatrix.from_array_implementation(start, following)
