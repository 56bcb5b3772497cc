"""JAX: batches and noise that belong together, for compiled steps (`make_private`) and for loops (`PrivateTraining`).

    private = dpmf.training.jax.make_private(mechanism, records=n, clip_norm=1.0, target_epsilon=8.0, target_delta=1e-5)
    gradient = private.gradient(loss)  # of a function loss(weights, record)
    optimizer = optax.chain(private.noise, optax.adam(1e-3))
    state = optimizer.init(weights)

    @jax.jit
    def step(weights, state):
        clipped = gradient(weights, data, private.batch(state))
        updates, state = optimizer.update(clipped, state, weights)
        return optax.apply_updates(weights, updates), state

The state of the optimizer holds everything that a run is resumed from: the key of batches and noise, the step, and the
noise that is kept. `PrivateTraining` is for loops that are not compiled as a whole; it checks that every batch is used
exactly once. `privatizer` is the noise alone, for those who keep track of its state themselves. jax-privacy clips.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from dpmf import validation
from dpmf.errors import TrainingError
from dpmf.mechanism import Mechanism
from dpmf.training._jax_noise import GENERATOR, checked, jax_privacy, privatizer
from dpmf.training._jax_steps import Batch, Private, State, make_private
from dpmf.training._jax_trees import bits, packed, unpacked
from dpmf.training._resumable import Resumable
from dpmf.training._sources import new_key
from dpmf.training.journal import Journal
from dpmf.training.sampler import BatchSampler, IndexArray

__all__ = ["Batch", "Private", "PrivateTraining", "State", "make_private", "privatizer"]


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
      dtype: "float64" draws and adds the noise in double precision, where JAX has that enabled. By default it has the
        precision of the gradients, which is float32 or float64: others are refused.

    **Formal guarantees.** What `add_noise` returns are the outputs of the mechanism: batches are those of the
    mechanism's batching (see `BatchSampler`), and the noise is noise_multiplier × l2_sensitivity × C⁻¹Z with C the
    strategy as given and Z from `normals`, where the first step after a gap adds the noise of the gap too. Clipping is
    the caller's: the clipped gradient of a record must be a function of the parameters, the record and what is drawn
    for it, and what is drawn for one record (for dropout, say) must be secret and not depend on which others there are.
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
        self._jax = jax_privacy()
        self.mechanism = checked(mechanism)
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
            "generator": GENERATOR,
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
        noise = {"key": self._key.hex(), "step": self._step, "state": packed(self._jax, self._state)}
        self._write(path, noise, {"model": packed(self._jax, model)})

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
        noise_state = unpacked(self._jax, noise["state"], self._state, path)
        restored = unpacked(self._jax, state["model"], model, path)
        journal.resumed()
        self.sampler.load_state_dict(state["sampler"])
        self._set_key(bytes.fromhex(noise["key"]))
        self._state, self._step, self._delivered, self.journal = noise_state, at, None, journal
        return restored


def _digest(tree: Any) -> str:
    """A short digest of noisy gradients: it tells different results of one step apart."""
    import jax

    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        digest.update(np.ascontiguousarray(bits(jax, leaf)).tobytes())
    return digest.hexdigest()[:16]
