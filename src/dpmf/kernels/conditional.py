"""Inner loops of conditional composition: tail-bound terms from prefix Gram matrices, thresholds, mixture weights."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import njit

# Proof constants (docs/theory/floating-point.md, "Loss distributions and conditional composition").
_EPS = 2.0**-52
_THRESHOLD_ERROR = 1e-12  # relative to the terms of a threshold
_HAZARD_ERROR = 1e-12  # relative error of a reverse hazard
_PER_UNIT = 128  # entries of the table of Φ per unit


class Terms(NamedTuple):
    """What the tail bounds of a block of steps need, without σ.

    Step r has means up to bases[r] in its lowest tie group and one entry e = starts[r], ..., starts[r+1]−1 per
    component i above it, by ascending mean: tops[e] that mean, same[e] (c) and other[e] (m) the numbers of lower
    components with the same and with another prefix. For variational distribution t and component k of the reference
    distribution (one, the origin, for "add"; all b for "remove")

        shifts[e, t, k] ≤ (⟨ρ_k, E μ_j − μ_i⟩ + (|μ_i|² − E|μ_j|²)/2) / scale,
        spreads[e, t, ·] ≥ |μ_i − E μ_j| / √scale,      divergences[e, t, ·] ≥ KL(ψ ‖ uniform),

    expectations under ψ on the m others. Single precision, rounded to the safe side.
    """

    starts: np.ndarray
    bases: np.ndarray
    tops: np.ndarray
    same: np.ndarray
    other: np.ndarray
    shifts: np.ndarray
    spreads: np.ndarray
    divergences: np.ndarray


class _Batch(NamedTuple):
    """Softmax distributions waiting for one product with the Gram matrix; centre −1 serves all of R's components."""

    psi: np.ndarray
    image: np.ndarray
    kls: np.ndarray
    entries: np.ndarray
    columns: np.ndarray
    owns: np.ndarray
    centres: np.ndarray


@njit(cache=True)
def _down(value: float) -> float:
    """The largest single-precision number that is not above `value`."""
    single = np.float32(value)
    if single > value:
        single = np.nextafter(single, np.float32(-np.inf))
    return float(single)


@njit(cache=True)
def _up(value: float) -> float:
    return -float(_down(-value))


@njit(cache=True)
def _refine(labels: np.ndarray, row: np.ndarray) -> None:
    """Split classes of equal prefixes by the next row, in place: components stay together while all rows agree."""
    order = np.argsort(row, kind="mergesort")
    b = len(row)
    rank = np.empty(b, np.int64)
    current = 0
    for i in range(b):
        if i > 0 and row[order[i]] != row[order[i - 1]]:
            current += 1
        rank[order[i]] = current
    if current == 0:
        return
    keys = labels * (current + 1) + rank
    order = np.argsort(keys, kind="mergesort")
    current = 0
    for i in range(b):
        if i > 0 and keys[order[i]] != keys[order[i - 1]]:
            current += 1
        labels[order[i]] = current


@njit(cache=True)
def _softmax(distances: np.ndarray, lower: np.ndarray, count: int, temperature: float, psi: np.ndarray) -> float:
    """psi = softmax(−distance/t) over `lower[:count]`, zero elsewhere; returns an upper bound on KL(psi ‖ uniform)."""
    least = math.inf
    for q in range(count):
        least = min(least, distances[lower[q]])
    psi[:] = 0.0
    total = 0.0
    for q in range(count):
        weight = math.exp(-(distances[lower[q]] - least) / temperature)
        if weight < 1e-30:  # any ψ will do, and products of tiny numbers are slow
            weight = 0.0
        psi[lower[q]] = weight
        total += weight
    divergence = math.log(count)
    for q in range(count):
        weight = psi[lower[q]] / total
        psi[lower[q]] = weight
        if weight > 0.0:
            divergence += weight * math.log(weight)
    return max(divergence, 0.0) + (count + 16.0) * _EPS * (1.0 + 2.0 * math.log(count))


@njit(cache=True)
def _store_uniform(
    e: int, own: int, sums: tuple, gram: np.ndarray, safety: float, scale: float, remove: bool, terms: Terms
) -> None:
    """Terms of the uniform ψ from prefix sums over the lower components.

    Components with the same prefix have the same Gram rows, so leaving them out is one subtraction.
    """
    column, trace, square = sums
    norm, equal, count = gram[own, own], float(terms.same[e]), terms.other[e]
    half = 0.5 * (norm - (trace - equal * norm) / count)
    half_size = 0.5 * (norm + (trace + equal * norm) / count)
    for k in range(terms.shifts.shape[2]):
        value, size = half, half_size
        if remove:
            cross = gram[own, k]
            value += (column[k] - equal * cross) / count - cross
            size += (column[k] + equal * cross) / count + cross
        terms.shifts[e, 0, k] = _down((value - safety * size) / scale)
    near = column[own]
    spread = norm - 2.0 * (near - equal * norm) / count
    spread += (square - 2.0 * equal * near + equal * equal * norm) / count**2
    size = norm + 2.0 * (near + equal * norm) / count
    size += (square + 2.0 * equal * near + equal * equal * norm) / count**2
    terms.spreads[e, 0, :] = _up(math.sqrt((max(spread, 0.0) + safety * size) / scale))
    terms.divergences[e, 0, :] = 0.0


@njit(cache=True)
def _product(psi: np.ndarray, gram: np.ndarray, filled: int, image: np.ndarray) -> None:
    """image = psi·gram, first `filled` rows: half of psi is zero, and threads of a BLAS would fight over few rows."""
    b = gram.shape[0]
    for first in range(0, filled, 16):
        last = min(first + 16, filled)
        image[first:last] = 0.0
        for j in range(b):
            for p in range(first, last):
                weight = psi[p, j]
                if weight != 0.0:
                    for k in range(b):
                        image[p, k] += weight * gram[j, k]


@njit(cache=True)
def _store_softmax(
    batch: _Batch, filled: int, gram: np.ndarray, safety: float, scale: float, remove: bool, terms: Terms
) -> None:
    """Terms of the first `filled` softmax distributions of the batch."""
    psi, image = batch.psi, batch.image
    _product(psi, gram, filled, image)
    b = gram.shape[0]
    for p in range(filled):
        e, t, own, centre = batch.entries[p], batch.columns[p], batch.owns[p], batch.centres[p]
        norm = gram[own, own]
        mean_norm = 0.0
        quadratic = 0.0
        for j in range(b):
            mean_norm += psi[p, j] * gram[j, j]
            quadratic += psi[p, j] * image[p, j]
        half, half_size = 0.5 * (norm - mean_norm), 0.5 * (norm + mean_norm)
        spread = norm - 2.0 * image[p, own] + quadratic
        size = norm + 2.0 * image[p, own] + quadratic
        slot = max(centre, 0)  # one slot for all components, or the centre's own
        terms.spreads[e, t, slot] = _up(math.sqrt((max(spread, 0.0) + safety * size) / scale))
        terms.divergences[e, t, slot] = _up(batch.kls[p])
        last = terms.shifts.shape[2] if centre < 0 else centre + 1
        for k in range(slot, last):
            value, size = half, half_size
            if remove:
                value += image[p, k] - gram[own, k]
                size += image[p, k] + gram[own, k]
            terms.shifts[e, t, k] = _down((value - safety * size) / scale)


@njit(cache=True)
def prefix_terms(
    rows: np.ndarray,
    done: int,
    gram: np.ndarray,
    labels: np.ndarray,
    scale: float,
    uniform: bool,
    temperatures: np.ndarray,
    by_component: bool,
    remove: bool,
    terms: Terms,
) -> None:
    """Fill `terms` for a block of rows of means; `gram` and `labels` are carried from block to block.

    `labels` names the classes of components whose prefixes are equal. Prefix Gram entries are sums of non-negative
    products, relative error at most (done + r)·2⁻⁵³; differences are moved to the safe side by that error, and what
    the sums over components add, times the sum of the terms' sizes.
    """
    b = rows.shape[1]
    finite = len(temperatures)
    first_finite = 1 if uniform else 0
    # Softmax distributions are gathered so that one matrix product serves many; option 2 has b per entry.
    centres_per_entry = b if by_component and remove else 1
    room = max(finite, min(finite * b, 2**22 // b))
    batch = _Batch(
        np.zeros((room, b)),
        np.empty((room, b)),
        np.empty(room),
        np.empty(room, np.int64),
        np.empty(room, np.int64),
        np.empty(room, np.int64),
        np.empty(room, np.int64),
    )
    lower, distances = np.empty(b, np.int64), np.empty(b)
    for r in range(rows.shape[0]):
        row = rows[r]
        order = np.argsort(row, kind="mergesort")
        safety = (done + r + 2.0 * b + 16.0) * _EPS
        column = np.zeros(b)  # Σ_{j lower} G[j, :]
        trace = 0.0  # Σ_{j lower} G[j, j]
        square = 0.0  # Σ_{j, l lower} G[j, l]
        e = terms.starts[r]
        filled = 0
        for i in range(b):
            own = order[i]
            if row[own] > terms.bases[r]:
                count = 0
                for q in range(i):
                    if labels[order[q]] != labels[own]:
                        lower[count] = order[q]
                        count += 1
                terms.tops[e], terms.same[e], terms.other[e] = row[own], i - count, count
                if count > 0 and uniform:
                    _store_uniform(e, own, (column, trace, square), gram, safety, scale, remove, terms)
                if count > 0 and finite > 0:
                    for c in range(centres_per_entry):
                        if filled + finite > room:
                            _store_softmax(batch, filled, gram, safety, scale, remove, terms)
                            filled = 0
                        centre = c if by_component else own
                        for q in range(count):
                            j = lower[q]
                            distances[j] = gram[j, j]
                            if remove or not by_component:
                                distances[j] += gram[centre, centre] - 2.0 * gram[centre, j]
                        for t in range(finite):
                            batch.kls[filled] = _softmax(distances, lower, count, temperatures[t], batch.psi[filled])
                            batch.entries[filled], batch.columns[filled] = e, first_finite + t
                            batch.owns[filled] = own
                            batch.centres[filled] = c if centres_per_entry > 1 else -1
                            filled += 1
                e += 1
            if i + 1 < b:
                square += 2.0 * column[own] + gram[own, own]
                trace += gram[own, own]
                for k in range(b):
                    column[k] += gram[own, k]
        if filled:
            _store_softmax(batch, filled, gram, safety, scale, remove, terms)
        for i in range(b):
            if row[i] != 0.0:
                for k in range(b):
                    gram[i, k] += row[i] * row[k]
        _refine(labels, row)


@njit(cache=True)
def mixture_thresholds(
    terms: Terms,
    precision: float,
    levels: np.ndarray,
    z_single: np.ndarray,
    z_joint: np.ndarray,
    table: np.ndarray,
    out: np.ndarray,
) -> None:
    """out[e] = τ with mean_k min_t Φ((τ − ν_tk)/ξ_t) ≤ levels[e], the largest to about 1e-7 relative.

    ν = precision·shift − divergence and ξ = √precision·spread. `z_single` is Φ⁻¹(level), `z_joint` Φ⁻¹(b·level) or
    +∞: below the least quantile at `level` every term is within it, above the least at b·level one term alone is not.
    `table[i]` = Φ(−i/128) down to where it vanishes; Φ is convex there, so interpolation errs upwards.
    """
    shifts, spreads, divergences, other = terms.shifts, terms.spreads, terms.divergences, terms.other
    family, references = shifts.shape[1], shifts.shape[2]
    per_component = spreads.shape[2] > 1
    root = math.sqrt(precision)
    last = len(table) - 1
    for e in range(shifts.shape[0]):
        if other[e] == 0:
            out[e] = 0.0
            continue
        slopes = np.empty((family, references))
        offsets = np.empty((family, references))
        low, high, everywhere = math.inf, math.inf, -math.inf
        reach = 0.0
        for k in range(references):
            single, joint = -math.inf, -math.inf
            for t in range(family):
                s = k if per_component else 0
                xi = max(root * spreads[e, t, s], 1e-150)
                nu = precision * shifts[e, t, k] - divergences[e, t, s]
                slopes[t, k] = 1.0 / xi
                offsets[t, k] = nu / xi
                single = max(single, nu + xi * z_single[e])
                joint = max(joint, nu + xi * z_joint[e])
                reach = max(reach, abs(nu))
            low, high, everywhere = min(low, single), min(high, joint), max(everywhere, single)
        high = max(min(high, everywhere), low)
        # Regula falsi with halving (Illinois) on log F − log level; only points found to be within the level are kept.
        f_low, f_high = -math.log(references), 1.0
        target = math.log(levels[e])
        side = 0
        z = np.empty(references)
        for step in range(100):
            if high - low <= 1e-7 * (1.0 + 1e-3 * abs(low)):
                break
            if step == 0:
                middle = 0.5 * (low + high)
            else:
                middle = (low * f_high - high * f_low) / (f_high - f_low)
                if not low < middle < high:
                    middle = 0.5 * (low + high)
            z[:] = math.inf
            for t in range(family):
                for k in range(references):
                    z[k] = min(z[k], slopes[t, k] * middle - offsets[t, k])
            total = 0.0
            for k in range(references):
                place = -z[k] * _PER_UNIT
                if place < 0.0:
                    total += 1.0
                elif place < last:
                    at = int(place)
                    total += table[at] + (table[at + 1] - table[at]) * (place - at)
                else:
                    total += table[last]
            value = math.log(max(total / references, 1e-320)) - target
            if value <= 0.0:
                low, f_low = middle, value
                if side == -1:
                    f_high *= 0.5
                side = -1
                if value > -1e-9:
                    break
            else:
                high, f_high = middle, value
                if side == 1:
                    f_low *= 0.5
                side = 1
        out[e] = low - _THRESHOLD_ERROR * (1.0 + abs(low) + reach)


@njit(cache=True)
def single_thresholds(terms: Terms, precision: float, z_single: np.ndarray, out: np.ndarray) -> None:
    """The same with one reference component: max_t ν_t + ξ_t Φ⁻¹(level)."""
    root = math.sqrt(precision)
    for e in range(terms.shifts.shape[0]):
        best, reach = -math.inf, 0.0
        if terms.other[e] > 0:
            for t in range(terms.shifts.shape[1]):
                nu = precision * terms.shifts[e, t, 0] - terms.divergences[e, t, 0]
                best = max(best, nu + root * terms.spreads[e, t, 0] * z_single[e])
                reach = max(reach, abs(nu))
        out[e] = best - _THRESHOLD_ERROR * (1.0 + abs(best) + reach) if terms.other[e] > 0 else 0.0


@njit(cache=True)
def mixture_weights(
    thresholds: np.ndarray,
    terms: Terms,
    grain: float,
    remove: bool,
    means: np.ndarray,
    weights: np.ndarray,
    ends: np.ndarray,
) -> None:
    """The dominating mixture of each step, ascending distinct means; step r ends before index ends[r].

    The reverse hazard of entry e is at most 1/(1 + c + m e^τ); the weights follow from the largest mean down. With
    grain > 0 hazards are raised to a power of e^(−grain), so that steps which hardly differ become equal.

    The weights are partial products of up to n factors 1 − hazard, with three roundings each. They are moved by more
    than these, upwards for "remove", where upper tails and the sum of all weights may not be too small, and downwards
    for "add", where lower tails and the sum may not be too large.
    """
    at = 0
    for r in range(len(terms.bases)):
        first = at
        rounding = 2.0 * (terms.starts[r + 1] - terms.starts[r] + 8.0) * _EPS
        remaining = 1.0 + rounding if remove else 1.0 - rounding
        # Written from the top down, then turned round.
        for e in range(terms.starts[r + 1] - 1, terms.starts[r] - 1, -1):
            rest = 1.0 + terms.same[e]
            if terms.other[e] > 0:
                rest += terms.other[e] * math.exp(min(thresholds[e], 700.0))
            hazard = min((1.0 + _HAZARD_ERROR) / rest, 1.0)
            if grain > 0.0:
                hazard = math.exp(-grain * math.floor(-math.log(hazard) / grain))
            weight = remaining * hazard
            remaining *= 1.0 - hazard
            if weight > 0.0:
                if at > first and means[at - 1] == terms.tops[e]:
                    weights[at - 1] += weight
                else:
                    means[at] = terms.tops[e]
                    weights[at] = weight
                    at += 1
        if remaining > 0.0:
            means[at] = terms.bases[r]
            weights[at] = remaining
            at += 1
        if at == first + 1:
            weights[first] = 1.0
        means[first:at] = means[first:at][::-1].copy()
        weights[first:at] = weights[first:at][::-1].copy()
        ends[r] = at
