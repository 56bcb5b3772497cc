"""The optimiser behind BandInvMF: the best C whose inverse is banded Toeplitz.

With A the prefix-sum matrix, D = C⁻¹ has coefficients 1, d_1, ..., d_{p−1}, and the loss is

    (mean or largest over t < n of ‖(A·D)[t, :]‖²) · ‖Σ_{j<k} C[:, jb]‖²,

the squared error of the prefix sums under unit noise times the squared sensitivity of a record that takes part in
iterations 0, b, ..., (k−1)b. For non-negative C no other bin of balls-in-bins batching has a larger mean, so this is
its sensitivity. If C is also non-increasing, it is the sensitivity for every schedule with separation at least b.

The partial sums B_t = 1 + d_1 + ... + d_t are the coefficients of A·D. They are written as products,
B_t = Π_{i≤t} (1 − u_i) with 0 ≤ u_i < 1, so that a box around u holds exactly the D with d_i ≤ 0 and Σ|d_i| < 1.
Those have an inverse with entries in [0, 1], which is what makes C usable and keeps the recursion from overflowing.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dpmf.numerics import Array
from dpmf.strategies.base import invert_series

_MAX_ROUNDS = 8


def optimise_noising_coef(n: int, bands: int, min_sep: int, participations: int, error: str) -> Array:
    """Return the first `bands` coefficients (at most n) of the best C⁻¹ for n iterations.

    This is quasi-Newton descent from the square-root coefficients (BISR), with exact gradients of O(n · bands) each.

    Args:
      n: the number of iterations.
      bands: the bandwidth of C⁻¹.
      min_sep: b, how many iterations lie between two participations of a record.
      participations: k, how often a record takes part.
      error: "mean" or "max", which squared error of the prefix sums to minimise.
    """
    from scipy.optimize import minimize

    p = min(bands, n)
    if p == 1:
        return np.ones(1)
    loss = _loss(n, p, min_sep, participations, error)
    u: Array = 1.0 / (2.0 * np.arange(1, p, dtype=np.float64))  # the square root of 1 − x in these coordinates
    best = np.inf
    for _ in range(_MAX_ROUNDS):
        # The box spoils the estimate of the curvature, which a new start discards. Two rounds are usually enough.
        found = minimize(
            loss,
            u,
            jac=True,
            method="L-BFGS-B",
            bounds=[(0.0, 1.0 - 1e-9)] * (p - 1),
            options={"maxiter": 2000, "maxfun": 4000, "maxcor": 20, "ftol": 1e-14, "gtol": 1e-9},
        )
        u = np.asarray(found.x, dtype=np.float64)
        if not found.fun < best - 1e-7:
            break
        best = float(found.fun)
    return _noising(u)[1]


def _noising(u: Array) -> tuple[Array, Array]:
    """Return (B, d), the coefficients of A·C⁻¹ and of C⁻¹."""
    partial = np.concatenate(([1.0], np.cumprod(1.0 - u)))
    # d_t = −u_t·B_{t−1}, without the cancellation of B_t − B_{t−1}; adding zero turns −0 into 0.
    return partial, np.concatenate(([1.0], -u * partial[:-1] + 0.0))


def _fold(column: Array, min_sep: int, participations: int) -> Array:
    """Return the sum over j < k of the column, moved down by j·min_sep and cut off at its length."""
    n = len(column)
    periods = -(-n // min_sep)
    padded = np.zeros(periods * min_sep)
    padded[:n] = column
    total = np.cumsum(padded.reshape(periods, min_sep), axis=0)
    if participations < periods:
        total[participations:] -= total[:-participations].copy()
    return total.reshape(-1)[:n]


def _loss(n: int, p: int, min_sep: int, participations: int, error: str) -> Callable[[Array], tuple[float, Array]]:
    """Return the function that gives the logarithm of the loss and its gradient with respect to u."""
    from scipy.signal import lfilter

    weight = np.ones(n) if error == "max" else np.arange(n, 0, -1) / n
    weight = np.append(weight[: p - 1], weight[p - 1 :].sum())  # B is constant from p − 1 on

    def evaluate(u: Array) -> tuple[float, Array]:
        partial, noising = _noising(u)
        squared_error = float(weight @ partial**2)
        column = invert_series(noising, n)
        mean = _fold(column, min_sep, participations)
        squared_sensitivity = float(mean @ mean)

        # Propagate the gradient back from the sensitivity to C, then to D: each transposed map is the map itself on
        # reversed sequences.
        back = _fold(mean[::-1], min_sep, participations) * (2.0 / squared_sensitivity)
        back = np.asarray(lfilter([1.0], noising, back), dtype=np.float64)[::-1]
        by_noising = -np.array([back[lag:] @ column[: n - lag] for lag in range(1, p)])

        by_partial = 2.0 * weight * partial / squared_error
        by_partial[1:] += by_noising
        by_partial[1:-1] -= by_noising[1:]
        suffix = np.cumsum((by_partial * partial)[::-1])[::-1][1:]
        return float(np.log(squared_error * squared_sensitivity)), -suffix / (1.0 - u)

    return evaluate
