"""jax-privacy: its strategies and its sampling as dpmf's, and σ as it defines it.

    sampling = batch_selection.BallsInBinsSampling(iterations=1000, cycle_length=100)
    sigma = calibrate(coef, sampling, target_epsilon=2.0, target_delta=1e-5).noise_multiplier
    private = dpmf.training.jax.make_private(
        mechanism(coef, sampling), records=n, clip_norm=l2_clip_norm, noise_multiplier=sigma, max_batch_size=B
    )

jax-privacy's own privatizers draw `jax.random.normal`, which ends at 5.42 standard deviations in single precision and
sooner in lower ones, so that an output beyond proves that a record is there. No σ makes up for that: the guarantees
here are those of normals whose tails are followed, as those of `dpmf.training.jax` are.

jax-privacy uses σ in two senses. The `stddev` of a privatizer over the clipping norm and the noise multiplier of
`experimental.monte_carlo` belong to the strategy as given, like dpmf's. The noise multiplier of
`amplified_bandmf_event` and `BandMFExecutionPlanConfig` (after 2.0.0 `BandMFConfig`) is for a strategy with columns of
norm one: dpmf's over the largest column norm (`unit_column_noise_multiplier`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from dpmf import api, errors, validation
from dpmf.batching import BallsInBins
from dpmf.errors import ArgumentError
from dpmf.mechanism import Mechanism
from dpmf.numerics import UNIT, Array
from dpmf.results import Calibration, CalibrationEstimate
from dpmf.strategies.base import Strategy, ToeplitzStrategy, block_rows, check_dense
from dpmf.strategies.buffered import GivenBuffers
from dpmf.strategies.explicit import coefficients, matrix
from dpmf.strategies.inversion import inverse_matrix, inverse_series

_ROUNDING = 1e-12  # how far below zero streaming in doubles may take an entry, relative to the largest entry
_TOEPLITZ_COST = 1e-4  # how much larger the sum of all entries may become to make C Toeplitz


def strategy(source: Any, *, iterations: int | None = None, noising: bool = False) -> Strategy:
    """Return the dpmf strategy of an object of jax-privacy.

    C is taken as it is, in double precision: nothing is normalised, and no entry is set to zero.

    Args:
      source: the coefficients of a Toeplitz C (1-D array, as from `toeplitz.optimize_banded_toeplitz`), a matrix C
        (2-D array, as from `dense.optimize`), a `BufferedToeplitz`, a `ColumnNormalizedBanded`, or a `StreamingMatrix`.
        A dpmf strategy is returned as it is.
      iterations: the size of C; needed for a `StreamingMatrix`, which has none of its own.
      noising: the source is C⁻¹, which is what a privatizer takes (arrays of two dimensions and `StreamingMatrix`).

    **Formal guarantees.** Upper bounds hold for the mechanism that runs. The strategy returned has the entries of an
    array exactly, whatever its precision. If the source is C⁻¹, no entry of the strategy is smaller than the absolute
    value of the entry of the exact inverse of the numbers given: a proved bound on the error of the inversion is added
    (docs/theory/floating-point.md, "The matrix that runs"). A `StreamingMatrix` stands for the matrix that it gives in
    double precision. If a Toeplitz matrix covers C and the sum of its entries is larger by 10⁻⁴ at most, it is taken,
    which can only raise a bound. Negative entries are refused unless the error of the inversion or the precision of the
    source explains them; then their absolute value counts. Lower bounds hold for the strategy returned, which may be
    larger than the matrix that runs by what is said here.
    """
    if isinstance(source, Strategy):
        return source
    if iterations is not None:
        iterations = validation.integer("iterations", iterations, at_least=1)
    with _double():
        if isinstance(source, _of_jax_privacy("StreamingMatrix", "streaming_matrix")):
            if iterations is None:
                raise ArgumentError("iterations", "must be given for a StreamingMatrix, which has no size of its own")
            check_dense(iterations)
            entries = np.asarray(source.materialize(iterations), dtype=np.float64)
            return _from_matrix(entries, noising, "StreamingMatrix")
        banded = _of_jax_privacy("ColumnNormalizedBanded", "banded")
        if isinstance(source, banded):
            _refuse(noising, "a ColumnNormalizedBanded")
            params = banded(params=np.asarray(source.params, dtype=np.float64))
            return _from_matrix(np.asarray(params.materialize(), dtype=np.float64), False, "ColumnNormalizedBanded")
        if isinstance(source, _of_jax_privacy("BufferedToeplitz", "buffered_toeplitz")):
            _refuse(noising, "a BufferedToeplitz")
            decay, scale = (
                np.atleast_1d(np.asarray(x, dtype=np.float64)) for x in (source.buf_decay, source.output_scale)
            )
            if decay.shape != scale.shape or decay.ndim != 1 or not np.all(np.isfinite([decay, scale])):
                raise ArgumentError(
                    "strategy", "must be a BufferedToeplitz of finite buffers, as many decays as scales"
                )
            return GivenBuffers(tuple(decay.tolist()), tuple(scale.tolist()))
    array = np.asarray(source)
    if array.ndim == 2:
        return _from_matrix(array, True, "array") if noising else matrix(array)
    if array.ndim == 1:
        _refuse(noising, "an array of coefficients")
        return coefficients(array)
    raise validation.wrong(
        "strategy",
        "an array of one or two dimensions, a BufferedToeplitz, ColumnNormalizedBanded or StreamingMatrix",
        source,
    )


def batching(sampling: Any) -> BallsInBins:
    """Return the `BallsInBins` of a `BallsInBinsSampling` of jax-privacy; other samplings are refused."""
    if isinstance(sampling, BallsInBins):
        return sampling
    with _double():
        known = _of_jax_privacy("BallsInBinsSampling", "batch_selection")
    if not isinstance(sampling, known):
        raise validation.wrong("sampling", "a jax_privacy BallsInBinsSampling", sampling)
    return BallsInBins.from_iterations(sampling.iterations, sampling.cycle_length)


def mechanism(source: Any, sampling: Any, *, noising: bool = False) -> Mechanism:
    """Return the `Mechanism` of a strategy (see `strategy`) and a sampling of jax-privacy."""
    bins = batching(sampling)
    return Mechanism(strategy(source, iterations=bins.iterations, noising=noising), bins)


def calibrate(
    source: Any, sampling: Any, *, target_epsilon: float, target_delta: float, noising: bool = False, **options: Any
) -> Calibration | CalibrationEstimate:
    """Call `dpmf.calibrate` for a strategy and a sampling of jax-privacy.

    Args:
      source: the strategy, as in `strategy`.
      sampling: the sampling, as in `batching`.
      target_epsilon: ε of the guarantee.
      target_delta: δ of the guarantee.
      noising: the source is C⁻¹, as in `strategy`.
      options: the other arguments of `dpmf.calibrate`.

    Returns:
      The calibration. Its `noise_multiplier` times the clipping norm is the `stddev` of the privatizer with this C⁻¹.

    **Formal guarantees.** Those of `dpmf.calibrate`, for normals whose tails are followed; jax-privacy's are cut off.
    """
    whole = mechanism(source, sampling, noising=noising)
    return api.calibrate(whole, target_epsilon=target_epsilon, target_delta=target_delta, **options)


def column_norm(source: Strategy | Mechanism, iterations: int | None = None) -> float:
    """Return the largest norm of a column of C, which jax-privacy's BandMF assumes to be one."""
    if isinstance(source, Mechanism):
        iterations, source = source.batching.iterations, source.strategy
    if not isinstance(source, Strategy):
        raise validation.wrong("source", "a dpmf strategy or mechanism", source)
    n = validation.integer("iterations", iterations, at_least=1)
    if isinstance(source, ToeplitzStrategy):
        return float(np.linalg.norm(source.strategy_coef(n)))
    squares = np.zeros(n)
    for _, block in source.rows(n, block_rows(n)):
        squares += np.sum(block * block, axis=0)
    return math.sqrt(float(squares.max()))


def unit_column_noise_multiplier(source: Mechanism, noise_multiplier: float) -> float:
    """Return what jax-privacy's BandMF calls noise multiplier: dpmf's σ over the largest column norm of C.

    `BandMFExecutionPlanConfig` multiplies it by that norm again, so that both add the same noise.
    """
    return validation.positive("noise_multiplier", noise_multiplier) / column_norm(source)


def _of_jax_privacy(name: str, module: str) -> Any:
    """A name of jax-privacy, wherever its releases have had that module."""
    packages = ("jax_privacy", "jax_privacy.matrix_factorization", "jax_privacy.experimental")
    try:
        return errors.found_in(name, *(f"{package}.{module}" for package in packages), *packages)
    except ImportError:
        raise errors.missing_extra("jax-privacy", "jax", "dpmf.integrations.jax_privacy") from None


def _refuse(noising: bool, what: str) -> None:
    if noising:
        raise ArgumentError("noising", f"must be False for {what}, which is C itself")


def _from_matrix(source: np.ndarray[Any, Any], noising: bool, what: str) -> Strategy:
    """Return the strategy of C, or of the inverse of C⁻¹, from the matrix that a source gives."""
    if source.dtype.kind not in "iuf" or not np.all(np.isfinite(source)):
        raise ArgumentError("strategy", f"must be real and finite, got a {what} that is not")
    entries = np.asarray(source, dtype=np.float64)
    # How far rounding to the precision of the source may move an entry below zero, relative to the largest entry.
    precision = float(np.finfo(source.dtype).eps) if source.dtype.kind == "f" else 0.0
    slack = max(_ROUNDING, len(entries) * precision)
    if not noising:
        return _simplest(_absolute(entries, slack * float(np.max(np.abs(entries), initial=0.0))))
    if entries.shape[0] != entries.shape[1] or np.any(np.diagonal(entries) == 0) or np.any(np.triu(entries, 1)):
        raise ArgumentError(
            "strategy", f"must have a lower-triangular inverse without zeros on its diagonal, got a {what}"
        )
    toeplitz = np.array_equal(entries[1:, 1:], entries[:-1, :-1])
    found = inverse_series(entries[:, 0]) if toeplitz else inverse_matrix(entries)
    largest = float(np.abs(found.values).max())
    covering = (_absolute(found.values, found.error + slack * largest) + found.error) * (1 + 4 * UNIT)
    return coefficients(covering) if toeplitz else _simplest(covering)


def _absolute(entries: Array, slack: Array | float) -> Array:
    """Return the absolute values, unless an entry is negative by more than the slack."""
    if np.any(entries < -slack):
        place = np.unravel_index(np.argmin(entries + slack), entries.shape)
        shown = ", ".join(str(int(i)) for i in place)
        raise ArgumentError("strategy", f"must be non-negative, got {entries[place]:.6g} at [{shown}] of C")
    return np.abs(entries)


def _simplest(entries: Array) -> Strategy:
    """Return a Toeplitz strategy that is no smaller in any entry, if one is hardly larger; otherwise the matrix."""
    if entries.ndim == 2 and entries.shape[0] == entries.shape[1] and not np.any(np.triu(entries, 1)):
        n = len(entries)
        column = np.array([np.diagonal(entries, -lag).max() for lag in range(n)])
        if float(column @ np.arange(n, 0, -1)) <= (1 + _TOEPLITZ_COST) * float(entries.sum()):
            return coefficients(column)
    return matrix(entries)


@contextlib.contextmanager
def _double() -> Iterator[None]:
    """Make jax use double precision inside the block only."""
    try:
        import jax
        import jax_privacy  # noqa: F401
    except ImportError:
        raise errors.missing_extra("jax-privacy", "jax", "dpmf.integrations.jax_privacy") from None
    with jax.enable_x64():
        yield
