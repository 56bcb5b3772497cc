"""jax-privacy: its strategies and its sampling as dpmf's, and σ in its words.

    sampling = batch_selection.BallsInBinsSampling(iterations=1000, cycle_length=100)
    sigma = calibrate(coef, sampling, target_epsilon=2.0, target_delta=1e-5).noise_multiplier
    privatizer = noise_addition.matrix_factorization_privatizer(
        toeplitz.inverse_as_streaming_matrix(coef), stddev=sigma * l2_clip_norm
    )

jax-privacy uses σ in two senses. The `stddev` of a privatizer over the clipping norm and the noise multiplier of
`experimental.monte_carlo` belong to the strategy as given, like dpmf's. The noise multiplier of
`amplified_bandmf_event` and `BandMFExecutionPlanConfig` is for a strategy with columns of norm one: dpmf's over the
largest column norm (`unit_column_noise_multiplier`).
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
from dpmf.results import Calibration, CalibrationEstimate
from dpmf.strategies.base import Strategy, ToeplitzStrategy, block_rows, check_dense
from dpmf.strategies.buffered import GivenBuffers
from dpmf.strategies.explicit import coefficients, matrix

_ROUNDING = 1e-12  # relative to the largest entry; what inverting or streaming in doubles may leave


def strategy(source: Any, *, iterations: int | None = None, noising: bool = False) -> Strategy:
    """A dpmf strategy from what jax-privacy makes.

    Args:
      source: the coefficients of a Toeplitz C (1-D array, as from `toeplitz.optimize_banded_toeplitz`), a matrix C
        (2-D array, as from `dense.optimize`), a `BufferedToeplitz`, a `ColumnNormalizedBanded`, a `StreamingMatrix`.
        A dpmf strategy is returned as it is.
      iterations: the size of C; needed for a `StreamingMatrix`, which has none of its own.
      noising: the source is C⁻¹, what a privatizer takes (arrays of two dimensions and `StreamingMatrix`).

    C is taken as it is, in double precision: nothing is normalised.

    **Formal guarantees.** Bounds are for the strategy returned. It has the entries of an array exactly, whatever its
    precision. Where a matrix was streamed or inverted it agrees with C to 10⁻¹² of the largest entry, or to N rounding
    errors of the source's own precision: entries smaller than that are taken to be zero, and diagonals that agree to
    that to be constant (their largest entry). Negative entries beyond it are refused.
    """
    if isinstance(source, Strategy):
        return source
    if iterations is not None:
        iterations = validation.integer("iterations", iterations, at_least=1)
    with _double():
        from jax_privacy.matrix_factorization import StreamingMatrix, banded, buffered_toeplitz

        if isinstance(source, StreamingMatrix):
            if iterations is None:
                raise ArgumentError("iterations", "must be given for a StreamingMatrix, which has no size of its own")
            check_dense(iterations)
            return _from_matrix(
                np.asarray(source.materialize(iterations), dtype=np.float64), noising, "StreamingMatrix"
            )
        if isinstance(source, banded.ColumnNormalizedBanded):
            _refuse(noising, "a ColumnNormalizedBanded")
            params = banded.ColumnNormalizedBanded(params=np.asarray(source.params, dtype=np.float64))
            return _from_matrix(np.asarray(params.materialize(), dtype=np.float64), False, "ColumnNormalizedBanded")
        if isinstance(source, buffered_toeplitz.BufferedToeplitz):
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
    """dpmf's `BallsInBins` from jax-privacy's `BallsInBinsSampling`; other samplings are refused."""
    if isinstance(sampling, BallsInBins):
        return sampling
    with _double():
        from jax_privacy import batch_selection
    if not isinstance(sampling, batch_selection.BallsInBinsSampling):
        raise validation.wrong("sampling", "a jax_privacy BallsInBinsSampling", sampling)
    return BallsInBins.from_iterations(sampling.iterations, sampling.cycle_length)


def mechanism(source: Any, sampling: Any, *, noising: bool = False) -> Mechanism:
    """dpmf's `Mechanism` from a strategy (see `strategy`) and a sampling of jax-privacy."""
    bins = batching(sampling)
    return Mechanism(strategy(source, iterations=bins.iterations, noising=noising), bins)


def calibrate(
    source: Any, sampling: Any, *, target_epsilon: float, target_delta: float, noising: bool = False, **options: Any
) -> Calibration | CalibrationEstimate:
    """`dpmf.calibrate` for a strategy and a sampling of jax-privacy; takes its other arguments too.

    `noise_multiplier` of the result, times the clipping norm, is the `stddev` of the privatizer with this C⁻¹.

    **Formal guarantees.** Those of `dpmf.calibrate`.
    """
    whole = mechanism(source, sampling, noising=noising)
    return api.calibrate(whole, target_epsilon=target_epsilon, target_delta=target_delta, **options)


def column_norm(source: Strategy | Mechanism, iterations: int | None = None) -> float:
    """The largest norm of a column of C, which jax-privacy's BandMF takes to be one."""
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
    """What jax-privacy's BandMF calls noise multiplier: dpmf's σ over the largest column norm of C.

    `BandMFExecutionPlanConfig` multiplies it by that norm again, so that both add the same noise.
    """
    return validation.positive("noise_multiplier", noise_multiplier) / column_norm(source)


def _refuse(noising: bool, what: str) -> None:
    if noising:
        raise ArgumentError("noising", f"must be False for {what}, which is C itself")


def _from_matrix(source: np.ndarray[Any, Any], inverse: bool, what: str) -> Strategy:
    if source.dtype.kind not in "iuf" or not np.all(np.isfinite(source)):
        raise ArgumentError("strategy", f"must be real and finite, got a {what} that is not")
    entries = np.asarray(source, dtype=np.float64)
    precision = float(np.finfo(source.dtype).eps) if source.dtype.kind == "f" else 0.0
    if inverse:
        from scipy.linalg import solve_triangular

        if entries.shape[0] != entries.shape[1] or np.any(np.diagonal(entries) == 0) or np.any(np.triu(entries, 1)):
            raise ArgumentError(
                "strategy", f"must have a lower-triangular inverse without zeros on its diagonal, got a {what}"
            )
        entries = np.asarray(solve_triangular(entries, np.eye(len(entries)), lower=True))
    tiny = max(_ROUNDING, len(entries) * precision) * float(np.max(np.abs(entries), initial=0.0))
    entries = np.where(np.abs(entries) <= tiny, 0.0, entries)
    diagonals = [np.diagonal(entries, -lag) for lag in range(len(entries))]
    if np.any(np.triu(entries, 1)) or any(float(np.ptp(diagonal)) > tiny for diagonal in diagonals):
        return matrix(entries)
    return coefficients(np.array([diagonal.max() for diagonal in diagonals]))


@contextlib.contextmanager
def _double() -> Iterator[None]:
    """jax in double precision inside the block only."""
    try:
        import jax
        import jax_privacy  # noqa: F401
    except ImportError:
        raise errors.missing_extra("jax-privacy", "jax", "dpmf.integrations.jax_privacy") from None
    with jax.enable_x64():
        yield
