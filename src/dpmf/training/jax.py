"""JAX: the noise and the batches of a mechanism through jax-privacy, whose clipping and noise addition are used.

    selection = dpmf.training.jax.batch_selection(mechanism)      # jax_privacy's BallsInBinsSampling
    privatizer = dpmf.training.jax.privatizer(mechanism, noise_multiplier=σ, l2_sensitivity=grad_fn.sensitivity())

The privatizer is an optax transformation whose state must be saved with the model: a resumed run with fresh noise is
not what was accounted for.
"""

from __future__ import annotations

import secrets
from typing import Any

import numpy as np

from dpmf import errors, validation
from dpmf.mechanism import Mechanism
from dpmf.strategies.base import ToeplitzStrategy
from dpmf.strategies.inversion import covering_inverse
from dpmf.training.noise import Plan, make_plan


def batch_selection(mechanism: Mechanism) -> Any:
    """jax-privacy's `BallsInBinsSampling` for N iterations over b bins. Its iterator ends after N batches."""
    selection = _jax_privacy()[1]
    batching = _checked(mechanism).batching
    return selection.BallsInBinsSampling(iterations=batching.iterations, cycle_length=batching.batches_per_epoch)


def privatizer(
    mechanism: Mechanism,
    *,
    noise_multiplier: float,
    l2_sensitivity: float,
    prng_key: Any = None,
    dtype: Any = None,
) -> Any:
    """The optax transformation that adds noise_multiplier × l2_sensitivity × the next row of C⁻¹Z, at most N times.

    Args:
      mechanism: strategy and number of iterations.
      noise_multiplier: σ for sensitivity 1 and the strategy as given.
      l2_sensitivity: how much one record can change the gradient in one iteration: the clipping norm divided by what
        the sum of clipped gradients is divided by (the *expected* batch size); `clipped_grad(...).sensitivity()`.
      prng_key: a JAX key, or an integer for experiments that are repeated. By default a secret of the operating system.
      dtype: of the noise; by default that of the gradients.

    **Formal guarantees.** The rows are those of C⁻¹Z with C the strategy as given; jax-privacy's own column
    normalisation is not used. Compiled code cannot raise: after iteration N the result is NaN, so that nothing more is
    released.
    """
    jax, _, noise_addition = _jax_privacy()
    _checked(mechanism)
    import jax.numpy as jnp
    import optax

    sigma = validation.positive("noise_multiplier", noise_multiplier)
    sensitivity = validation.positive("l2_sensitivity", l2_sensitivity)
    n = mechanism.batching.iterations
    plan = make_plan(mechanism.strategy, n)
    if prng_key is None:
        # jax.random.key would keep 32 bits of a seed only.
        prng_key = jax.random.wrap_key_data(jnp.array([secrets.randbits(32) for _ in (0, 1)], dtype=jnp.uint32))
    inner = noise_addition.matrix_factorization_privatizer(
        _noising_matrix(mechanism, plan), stddev=sigma * sensitivity * plan.scale, prng_key=prng_key, dtype=dtype
    )

    def init(parameters: Any) -> Any:
        return jnp.zeros((), dtype=jnp.int32), inner.init(parameters)

    def update(sum_of_clipped_grads: Any, state: Any, params: Any = None) -> Any:
        count, noise = state
        noisy, noise = inner.update(sum_of_clipped_grads, noise, params)
        allowed = count < n
        return jax.tree.map(lambda g: jnp.where(allowed, g, jnp.nan).astype(g.dtype), noisy), (count + 1, noise)

    return optax.GradientTransformation(init, update)


def _jax_privacy() -> tuple[Any, Any, Any]:
    try:
        import jax
        from jax_privacy import batch_selection as selection
        from jax_privacy import noise_addition
    except ImportError:
        raise errors.missing_extra("jax-privacy", "jax", "training with JAX") from None
    return jax, selection, noise_addition


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
