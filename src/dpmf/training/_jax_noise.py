"""The noise C⁻¹Z as an optax transformation, by jax-privacy's noise addition."""

from __future__ import annotations

import secrets
from typing import Any

import numpy as np

from dpmf import errors, validation
from dpmf.mechanism import Mechanism
from dpmf.strategies.base import ToeplitzStrategy
from dpmf.strategies.inversion import covering_inverse
from dpmf.strategies.settling import Settling
from dpmf.strategies.streaming import Plan, make_plan
from dpmf.training._schedule import Schedule


def privatizer(
    mechanism: Mechanism,
    *,
    noise_multiplier: float,
    l2_sensitivity: float,
    prng_key: Any = None,
    dtype: Any = None,
) -> Any:
    """The optax transformation that adds noise_multiplier × l2_sensitivity × the next row of C⁻¹Z, once per batch.

    The first step after a gap between throws adds its own row and a weighted sum of those of the gap (`NoiseStream`).

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
    jax, noise_addition = jax_privacy()
    checked(mechanism)
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


def jax_privacy() -> tuple[Any, Any]:
    """The modules `jax` and `jax_privacy.noise_addition`, or an error that says what to install."""
    try:
        import jax
        from jax_privacy import noise_addition
    except ImportError:
        raise errors.missing_extra("jax-privacy", "jax", "training with JAX") from None
    return jax, noise_addition


def checked(mechanism: Mechanism) -> Mechanism:
    """The mechanism, if it is one."""
    if not isinstance(mechanism, Mechanism):
        raise validation.wrong("mechanism", "a dpmf.Mechanism", mechanism)
    return mechanism


def _noising_matrix(mechanism: Mechanism, plan: Plan) -> Any:
    """C⁻¹ (up to the plan's scale) as jax-privacy takes it: streaming where the plan streams, dense otherwise."""
    import jax.numpy as jnp
    from jax_privacy.matrix_factorization import streaming_matrix, toeplitz

    settling = mechanism.settling
    if plan.method == "regeneration" or not (
        plan.method == "buffers" or isinstance(mechanism.strategy, ToeplitzStrategy)
    ):
        inverse = covering_inverse(mechanism.strategy, mechanism.batching.iterations)
        if settling is not None:
            inverse = _settled(inverse, settling)
        return np.asarray(inverse / plan.scale)  # not a JAX array, which jax-privacy refuses while it is traced
    if settling is not None:
        return _settled_rows(plan, settling)
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


def _settled(inverse: Any, settling: Settling) -> Any:
    """C⁻¹ that begins anew with every throw, with the rows of gaps weighted."""
    out = np.zeros_like(inverse)
    for first in range(0, len(out), settling.rows):
        rows = min(settling.rows, len(out) - first)
        out[first : first + rows, first : first + rows] = inverse[:rows, :rows]
        out[first + settling.steps : first + rows] *= settling.weights[: rows - settling.steps, None]
    return out


def _settled_rows(plan: Plan, settling: Settling) -> Any:
    """The same as a streaming matrix, which counts its rows."""
    import jax.numpy as jnp
    from jax_privacy.matrix_factorization import streaming_matrix

    kept = plan.copies
    row = np.asarray(plan.weights[0])
    weights = np.append(np.ones(settling.steps), settling.weights)

    def start(value: Any) -> Any:
        zero = jnp.zeros_like(value)
        return jnp.zeros((), dtype=jnp.int32), jnp.broadcast_to(zero, (kept, *zero.shape))

    def following(z: Any, state: Any) -> Any:
        place, past = state
        past = jnp.where(place == 0, 0, past)
        if plan.method == "convolution":  # a gap that is most of the run: C and C⁻¹ may both be banded
            new = z * row[0] + jnp.tensordot(jnp.asarray(row[1:], z.dtype), past, axes=1)
            newest = z
        else:
            new = newest = (z - jnp.tensordot(jnp.asarray(row[1:], z.dtype), past, axes=1)) / row[0]
        if kept:
            past = jnp.roll(past, 1, axis=0).at[0].set(newest)
        out = (new * jnp.asarray(weights, z.dtype)[place]).astype(z.dtype)
        return out, ((place + 1) % settling.rows, past)

    return streaming_matrix.StreamingMatrix.from_array_implementation(start, following)
