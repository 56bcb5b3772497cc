"""The noise C⁻¹Z as an optax transformation: normals drawn from a key, and the recurrence that correlates them."""

from __future__ import annotations

import secrets
from functools import partial
from typing import Any

import numpy as np

from dpmf import errors, validation
from dpmf.mechanism import Mechanism
from dpmf.strategies.base import ToeplitzStrategy
from dpmf.strategies.inversion import covering_inverse
from dpmf.strategies.settling import Settling
from dpmf.strategies.streaming import Plan, make_plan
from dpmf.training._schedule import Schedule

# With r = √(−2 log p), a normal exceeds r − (a polynomial in r over another) with probability p: off by 8·10⁻⁸ at most
# for r between √(2 log 2) and 9.5. The highest power comes first.
_NUMERATOR = (0.06654275121, 2.144831243, 8.480465815, 3.181411103)
_DENOMINATOR = (0.01051224005, 0.5679909578, 4.080779008, 5.262094570, 1.0)
GENERATOR = "normals of 64 bits"  # checkpoints name it; those of dpmf 0.2 and before have noise from jax.random.normal


def normals(key: Any, shape: tuple[int, ...], dtype: Any = "float32", out_sharding: Any = None) -> Any:
    """Independent standard normals from a JAX key, whatever the precision that JAX computes in by default.

    **Formal guarantees.** Those of `normals_of`, for words of JAX's generator.
    """
    import jax

    high, low = (jax.random.bits(half, shape, "uint32", out_sharding=out_sharding) for half in jax.random.split(key))
    return normals_of(high, low, dtype)


def normals_of(high: Any, low: Any, dtype: Any = "float32") -> Any:
    """The standard normals that belong to pairs of 32-bit words; `dtype` is float32 or float64.

    **Formal guarantees.** The last bit of `high` is the sign. With k the integer of the other 63 bits, the absolute
    value is the one that a normal exceeds with probability (2k + 1)·2⁻⁶⁴ (both signs together), so that the tails are
    followed to 9.15 standard deviations (the mass beyond is 5·10⁻²⁰). In single precision no number is off by more than
    3·10⁻⁶, and up to 4 standard deviations by no more than 10⁻⁶, as tested on CPUs (elsewhere XLA's logarithm may be
    rounded otherwise); in double precision by no more than 10⁻¹⁴. Were the missing bits drawn as well, so that the
    numbers were exactly normal, no number would move by more than another 10⁻⁷, except beyond 7 standard deviations
    (3·10⁻¹² of all numbers).
    """
    import jax
    import jax.numpy as jnp

    below = ((high >> 1).astype(dtype) * 2.0**32 + low.astype(dtype) + 0.5) * 2.0**-64
    if jnp.dtype(dtype) == "float64":
        value = -jax.scipy.special.ndtri(below)
    else:
        radius = jnp.sqrt(-2 * jnp.log(below))
        above, under = (jnp.polyval(jnp.asarray(one, dtype), radius) for one in (_NUMERATOR, _DENOMINATOR))
        value = radius - above / under
    return jnp.where(high & 1 == 1, -value, value)


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
        system.
      dtype: "float64" draws and adds the noise in double precision, where JAX has that enabled. By default it has the
        precision of the gradients.

    Returns:
      An optax transformation. Its state (which holds the key) and the assignment of records to batches belong together;
      `PrivateTraining` saves and restores both.

    **Formal guarantees.** The rows are those of C⁻¹Z with C the strategy as given and Z from `normals`, drawn,
    correlated and added in single or double precision. Parameters and gradients of a lower precision are refused.
    Compiled code cannot raise: after the last step the result is NaN, so that nothing more is released.
    """
    jax = jax_privacy()
    checked(mechanism)
    import jax.numpy as jnp
    import optax

    sigma = validation.positive("noise_multiplier", noise_multiplier)
    sensitivity = validation.positive("l2_sensitivity", l2_sensitivity)
    schedule = Schedule.of(mechanism.batching)
    plan = make_plan(mechanism.strategy, mechanism.batching.iterations)
    dense = _dense(mechanism, plan)
    stddev = sigma * sensitivity * plan.scale
    if prng_key is None:
        # jax.random.key would use only 32 bits of a seed.
        prng_key = jax.random.wrap_key_data(jnp.array([secrets.randbits(32) for _ in (0, 1)], dtype=jnp.uint32))
    elif isinstance(prng_key, int):
        prng_key = jax.random.key(prng_key)

    def zeros(leaf: Any) -> Any:
        return jnp.zeros_like(leaf, dtype=precision(leaf, dtype))

    def white(key: Any, row: Any, zero: Any) -> Any:
        z = optax.tree.random_like(jax.random.fold_in(key, row), zero, normals)
        return jax.tree.map(lambda leaf: stddev * leaf, z)

    def following(zero: Any, state: Any) -> tuple[Any, Any]:
        key, row, kept = state
        if dense is None:
            both = jax.tree.map(partial(_streamed, plan, mechanism.settling, row), white(key, row, zero), kept)
            noise, kept = jax.tree.transpose(jax.tree.structure(zero), jax.tree.structure((0, 0)), both)
        else:
            factors = jnp.asarray(dense)[row]

            def add(i: Any, total: Any) -> Any:
                return jax.tree.map(lambda x, z: x + factors[i].astype(z.dtype) * z, total, white(key, i, zero))

            noise = jax.lax.fori_loop(jnp.argmax(factors != 0).astype(row.dtype), row + 1, add, zero)
        return noise, (key, row + 1, kept)

    def init(parameters: Any) -> Any:
        zero, copies = jax.tree.map(zeros, parameters), plan.copies
        kept = () if dense is not None else jax.tree.map(lambda z: jnp.broadcast_to(z, (copies, *z.shape)), zero)
        return jnp.zeros((), dtype=jnp.int32), (prng_key, jnp.zeros((), dtype=jnp.int32), kept)

    def update(sum_of_clipped_grads: Any, state: Any, params: Any = None) -> Any:
        count, zero = state[0], jax.tree.map(zeros, sum_of_clipped_grads)
        noise, state = following(zero, state[1])

        def more(_: Any, both: Any) -> Any:
            row, state = following(zero, both[1])
            return jax.tree.map(jnp.add, both[0], row), state

        if schedule.gap:  # the first step after a gap adds the rows of the gap too
            after = (count > 0) & (count % schedule.per_draw == 0)
            noise, state = jax.lax.fori_loop(0, jnp.where(after, schedule.gap, 0), more, (noise, state))
        noisy = jax.tree.map(
            lambda g, z: jnp.where(count < schedule.steps, g + z, jnp.nan).astype(g.dtype), sum_of_clipped_grads, noise
        )
        return noisy, (count + 1, state)

    return optax.GradientTransformation(init, update)


def precision(leaf: Any, dtype: Any = None) -> Any:
    """The precision in which noise is added to an array: its own, or that of `dtype` if it is higher.

    **Formal guarantees.** float32 or float64. Others are refused: rounded noise shows the digits of the sum.
    """
    jax = jax_privacy()
    own = jax.numpy.result_type(leaf)
    asked = own if dtype is None else jax.numpy.dtype(dtype)
    for given in (own, asked):
        if given.name not in ("float32", "float64"):
            raise validation.wrong("dtype", "float32 or float64, of parameters, gradients and noise alike", given.name)
    return jax.dtypes.canonicalize_dtype(jax.numpy.promote_types(own, asked))


def jax_privacy() -> Any:
    """The module `jax`, or an error that says what to install."""
    try:
        import jax
        import jax_privacy  # noqa: F401
    except ImportError:
        raise errors.missing_extra("jax-privacy", "jax", "training with JAX") from None
    return jax


def checked(mechanism: Mechanism) -> Mechanism:
    """The mechanism, if it is one."""
    if not isinstance(mechanism, Mechanism):
        raise validation.wrong("mechanism", "a dpmf.Mechanism", mechanism)
    return mechanism


def _dense(mechanism: Mechanism, plan: Plan) -> Any:
    """C⁻¹ (up to the plan's scale) where all of its rows are needed; None where the plan streams them."""
    if plan.method == "buffers" or (plan.method != "regeneration" and isinstance(mechanism.strategy, ToeplitzStrategy)):
        return None
    inverse = covering_inverse(mechanism.strategy, mechanism.batching.iterations)
    if mechanism.settling is not None:
        inverse = _settled(inverse, mechanism.settling)
    return np.asarray(inverse / plan.scale)


def _streamed(plan: Plan, settling: Settling | None, row: Any, z: Any, past: Any) -> tuple[Any, Any]:
    """The next row of C⁻¹Z (up to the plan's scale) for one array, and what is kept for the rows after it.

    With `settling`, C⁻¹ begins anew with every throw, and the rows of gaps are weighted.

    Args:
      plan: how rows are computed, for a Toeplitz C.
      settling: how the rows of gaps are used.
      row: the number of the row.
      z: its normals.
      past: what is kept.
    """
    import jax.numpy as jnp

    if plan.method == "buffers":
        decay, weight = (jnp.asarray(one, z.dtype) for one in plan.weights)
        out = z - jnp.tensordot(weight, past, axes=1)
        return out, past * decay.reshape(-1, *(1,) * z.ndim) + out
    if settling is not None:
        past = jnp.where(row % settling.rows == 0, 0, past)
    first, convolution = float(plan.weights[0, 0]), plan.method == "convolution"
    mixed = jnp.tensordot(jnp.asarray(plan.weights[0, 1 : 1 + plan.copies], z.dtype), past, axes=1)
    out = first * z + mixed if convolution else (z - mixed) / first
    if plan.copies:
        past = jnp.concatenate([(z if convolution else out)[None], past[:-1]])
    if settling is not None:
        out = out * jnp.asarray(np.append(np.ones(settling.steps), settling.weights), z.dtype)[row % settling.rows]
    return out, past


def _settled(inverse: Any, settling: Settling) -> Any:
    """C⁻¹ that begins anew with every throw, with the rows of gaps weighted."""
    out = np.zeros_like(inverse)
    for first in range(0, len(out), settling.rows):
        rows = min(settling.rows, len(out) - first)
        out[first : first + rows, first : first + rows] = inverse[:rows, :rows]
        out[first + settling.steps : first + rows] *= settling.weights[: rows - settling.steps, None]
    return out
