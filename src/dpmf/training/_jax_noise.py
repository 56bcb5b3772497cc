"""The noise C⁻¹Z in JAX: normals drawn from a key, and the recurrence that correlates them."""

from __future__ import annotations

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
# for r between √(2 log 2) and 9.5, and by 3·10⁻⁶ to 11.6. The highest power comes first.
REACH = 11.3  # the largest normal, rounded down
_NUMERATOR = (0.06654275121, 2.144831243, 8.480465815, 3.181411103)
_DENOMINATOR = (0.01051224005, 0.5679909578, 4.080779008, 5.262094570, 1.0)
GENERATOR = "normals of 96 bits, on a grid"  # checkpoints name it


def normals(key: Any, shape: tuple[int, ...], dtype: Any = "float32", out_sharding: Any = None) -> Any:
    """Independent standard normals from a JAX key, whatever the precision that JAX computes in by default.

    **Formal guarantees.** Those of `normals_of`, for words of JAX's generator.
    """
    import jax
    import jax.numpy as jnp

    def words(one: Any) -> Any:
        return jax.random.bits(one, shape, "uint32", out_sharding=out_sharding)

    keys = jax.random.split(key, 3)
    high, low = words(keys[0]), words(keys[1])
    deep = jax.lax.cond(jnp.any(high < 2), lambda: words(keys[2]), lambda: jnp.zeros_like(high))
    return normals_of(high, low, deep, dtype)


def normals_of(high: Any, low: Any, deep: Any, dtype: Any = "float32") -> Any:
    """The standard normals that belong to triples of 32-bit words; `dtype` is float32 or float64.

    **Formal guarantees.** The last bit of `high` is the sign. With k the integer of the other bits, the absolute value
    is the one that a normal exceeds with probability (2k + 1)·2⁻⁹⁶ (both signs together) where the first 31 bits are
    zero, and (2k + 1)·2⁻⁶⁴, without the bits of `deep`, elsewhere. So the tails are followed to 11.3 standard
    deviations (the mass beyond is 2⁻⁹⁶). In single precision no number is off by more than 3·10⁻⁶, and up to 4 standard
    deviations by no more than 10⁻⁶, as tested on CPUs (elsewhere XLA's logarithm may be rounded otherwise); in double
    precision by no more than 2·10⁻¹⁴. Were the missing bits drawn as well, so that the numbers were exactly normal, no
    number would move by more than another 10⁻⁷, except beyond 9.5 standard deviations (2·10⁻²¹ of all numbers).
    """
    import jax
    import jax.numpy as jnp

    whole, tail = (x.astype(dtype) * 2.0**32 + y.astype(dtype) + 0.5 for x, y in ((high >> 1, low), (low, deep)))
    below = jnp.where(high < 2, tail * 2.0**-96, whole * 2.0**-64)
    if jnp.dtype(dtype) == "float64":
        value = -jax.scipy.special.ndtri(below)
    else:
        radius = jnp.sqrt(-2 * jnp.log(below))
        above, under = (jnp.polyval(jnp.asarray(one, dtype), radius) for one in (_NUMERATOR, _DENOMINATOR))
        value = radius - above / under
    return jnp.where(high & 1 == 1, -value, value)


class Rows:
    """The rows of C⁻¹Z for a tree of arrays, as functions of a key, the step and what is kept of the past.

    Args:
      mechanism: strategy and batching.
      stddev: the standard deviation of Z.
      dtype: "float64" for double precision, where JAX has that enabled; by default that of parameters which have it.

    **Formal guarantees.** Rows are those of C⁻¹Z with C the strategy as given and Z from `normals`, drawn and
    correlated in single or double precision.
    """

    def __init__(self, mechanism: Mechanism, stddev: float, dtype: Any):
        self._schedule = Schedule.of(mechanism.batching)
        self._plan = make_plan(mechanism.strategy, mechanism.batching.iterations)
        self._settling, self._dense = mechanism.settling, _dense(mechanism, self._plan)
        self._stddev, self._dtype = stddev * self._plan.scale, dtype

    def zeros(self, tree: Any) -> Any:
        """Arrays like those of a tree of parameters, in the precision of the noise."""
        import jax
        import jax.numpy as jnp

        return jax.tree.map(lambda leaf: jnp.zeros_like(leaf, dtype=precision(leaf, self._dtype)), tree)

    def begin(self, zero: Any) -> Any:
        """What is kept before the first step."""
        import jax
        import jax.numpy as jnp

        copies = self._plan.copies
        return () if self._dense is not None else jax.tree.map(lambda z: jnp.broadcast_to(z, (copies, *z.shape)), zero)

    def next(self, key: Any, step: Any, kept: Any, zero: Any) -> tuple[Any, Any]:
        """The noise of a step, and what is kept after it. The first step after a gap adds the rows of the gap too."""
        import jax
        import jax.numpy as jnp

        gap, per_draw = self._schedule.gap, self._schedule.per_draw
        row = step + jnp.maximum(step - 1, 0) // per_draw * gap
        noise, kept = self._row(key, row, kept, zero)

        def more(i: Any, both: Any) -> Any:
            following, kept = self._row(key, row + 1 + i, both[1], zero)
            return jax.tree.map(jnp.add, both[0], following), kept

        if gap:
            after = (step > 0) & (step % per_draw == 0)
            noise, kept = jax.lax.fori_loop(0, jnp.where(after, gap, 0), more, (noise, kept))
        return noise, kept

    def _row(self, key: Any, row: Any, kept: Any, zero: Any) -> tuple[Any, Any]:
        import jax
        import jax.numpy as jnp
        import optax

        def white(row: Any) -> Any:
            z = optax.tree.random_like(jax.random.fold_in(key, row), zero, normals)
            return jax.tree.map(lambda leaf: self._stddev * leaf, z)

        if self._dense is None:
            both = jax.tree.map(partial(_streamed, self._plan, self._settling, row), white(row), kept)
            noise, kept = jax.tree.transpose(jax.tree.structure(zero), jax.tree.structure((0, 0)), both)
            return noise, kept
        factors = jnp.asarray(self._dense)[row]

        def add(i: Any, total: Any) -> Any:
            return jax.tree.map(lambda x, z: x + factors[i].astype(z.dtype) * z, total, white(i))

        return jax.lax.fori_loop(jnp.argmax(factors != 0).astype(row.dtype), row + 1, add, zero), kept


def precision(leaf: Any, dtype: Any = None) -> Any:
    """The precision of the noise of an array: float64 where that is asked for or where the array has it, or float32."""
    import jax

    own = jax.numpy.result_type(leaf)
    if own.name not in ("float64", "float32", "bfloat16", "float16"):
        raise validation.wrong("parameters", "float64, float32, bfloat16 or float16", own.name)
    asked = jax.numpy.dtype("float32" if dtype is None else dtype)
    if asked.name not in ("float32", "float64"):
        raise validation.wrong("dtype", "float32 or float64, in which noise is drawn", asked.name)
    return jax.dtypes.canonicalize_dtype(jax.numpy.promote_types(own, asked))


def installed() -> Any:
    """The module `jax`, or an error that says what to install."""
    try:
        import jax
        import optax  # noqa: F401
    except ImportError:
        raise errors.missing_extra("jax-privacy", "jax", "training with JAX") from None
    return jax


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
    import jax
    import jax.numpy as jnp

    mix = partial(jnp.tensordot, axes=1, precision=jax.lax.Precision.HIGHEST)
    if plan.method == "buffers":
        decay, weight = (jnp.asarray(one, z.dtype) for one in plan.weights)
        out = z - mix(weight, past)
        return out, past * decay.reshape(-1, *(1,) * z.ndim) + out
    if settling is not None:
        past = jnp.where(row % settling.rows == 0, 0, past)
    first, convolution = float(plan.weights[0, 0]), plan.method == "convolution"
    mixed = mix(jnp.asarray(plan.weights[0, 1 : 1 + plan.copies], z.dtype), past)
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
