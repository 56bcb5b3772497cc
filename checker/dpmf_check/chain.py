"""Chains: a Gram matrix above G whose Gaussian field is made of blocks, and an option on its basket T = Σ a_i.

Index i of block B has u = left_i·s_B + right_i·s_(B+1) + deviation_i·x_i + v_i: independent standard normals s, a chain
x of unit variance, x_0 = ρ_0·s_B + ..., x_i = ρ_i·x_(i−1) + ..., and independent v_i of variance nugget_i. Blocks are
alike, on a line or (closed) on a ring. docs/certificates.md has the proofs.
"""

import math
from itertools import accumulate
from operator import mul
from typing import Any

import numpy as np
from flint import acb, acb_poly, arb

from dpmf_check.balls import TINY, UNIT, grid, number, numbers, only, require, spread, tail, up
from dpmf_check.gram import Gram

_SHIFT = 2.0**-44  # much more than the relative error of positions in double precision


class Model:
    """The loads of one block, divided by σ once they dominate G, and how many blocks there are."""

    def __init__(self, given: Any, gram: Gram, sigma: arb) -> None:
        names = "left", "right", "deviations", "correlations", "nuggets", "blocks", "closed", "left_out"
        *lists, self.blocks, self.closed, left_out = only("model", given, *names)
        self.length, self.left_out = len(lists[0]), arb(number("left_out", left_out))
        lists = [numbers("model", x, self.length) for x in lists]
        self.left, self.right, self.deviations, self.rho, self.nuggets = lists
        self.size = self.length * number("blocks", self.blocks, 1, 10**6, True)
        require(type(self.closed) is bool and (self.blocks > 1 or not self.closed), "one block cannot be a ring")
        require(0 < self.size <= gram.b, "the model has no indices, or more than there are batches")
        linked = self.rho[0] == 0 or (self.rho[0] < 1 and all(x == 0 for x in self.left))
        require(linked and all(x <= 1 for x in self.rho), "a correlation is too large, or left loads are linked")
        carried = zip(self.left, self.deviations, accumulate(self.rho, mul), strict=True)
        self.before = [own + deviation * rho for own, deviation, rho in carried]  # all loads of s_B
        self._check_domination(gram)
        for part, scale in zip((*lists[:3], self.before, self.nuggets), [sigma] * 4 + [sigma**2], strict=True):
            part[:] = [x / scale for x in part]
        self.left_out /= sigma**2

    def _check_domination(self, gram: Gram) -> None:
        """Entry by entry; with fewer indices than batches, for every window of so many neighbours on the ring."""
        n, length, whole = self.size, self.length, self.size == gram.b <= 2000
        for p in range(n if whole else length):
            i, chain = p % length, self.deviations[p % length]
            for q in range(p, n):
                j, offset, above = q % length, q // length - p // length, self.left_out
                if offset == 0:
                    chain *= self.rho[j] if q > p else 1
                    above += self.left[i] * self.left[j] + self.right[i] * self.right[j] + chain * self.deviations[j]
                above += self.nuggets[i] if q == p else 0
                above += self.right[i] * self.before[j] if offset == 1 else 0
                above += self.right[j] * self.before[i] if self.closed and offset == self.blocks - 1 else 0
                below = gram.full[p][q] if whole else gram.lags[q - p] if n == gram.b else gram.ring[q - p]
                require(below <= above, f"domination fails at entry {p}, {q}")


class Terms:
    """Terms a = min(e^y·N, K), N a nugget: y is spread onto the nodes low + step·k and −∞, N onto such nodes, too."""

    def __init__(self, given: Any, nuggets: list[arb], strike: arb, sign: int) -> None:
        self.low, self.step, self.count = grid(given)
        widest = max(map(up, nuggets)) ** 0.5
        self.reach = reach = math.ceil((8.5 * widest + widest**2) / self.step) + 1
        exact = [(arb(self.low) + arb(self.step) * k).exp() for k in range(-reach, self.count + reach)]
        atoms = np.array([up(a) if sign > 0 else math.nextafter(float(a.lower()), 0.0) for a in exact])
        cut, self.atoms, self.laws, self.excess = up(strike), np.minimum(atoms, up(strike)), {}, {}
        for key, nugget in {str(nugget): nugget for nugget in nuggets}.items():
            weights, lost, rest = [0.0] * reach + [1.0] + [0.0] * reach, 0.0, arb(0)
            if nugget > 0:
                places = [arb(self.step) * k for k in range(-reach, reach + 1)]
                weights, lost, rest = spread(places, -nugget / 2, nugget.sqrt(), arb(1))
            over = np.convolve(np.maximum(atoms - cut, 0.0), weights[::-1], mode="valid")
            self.excess[key] = np.append(0.0, over + up(rest) * atoms[reach : reach + self.count])
            self.laws[key] = weights[::-1], lost

    def locate(self, y: np.ndarray, nugget: arb) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Row (0 is a = 0) and share of the next, and for calls the expectation of what is cut off."""
        place = np.clip(np.floor((y - self.low) / self.step), -1, self.count - 2)
        inside = np.expm1(y - self.low - place * self.step) / math.expm1(self.step)
        share = np.clip(np.where(place < 0, np.exp(np.minimum(y - self.low, 0.0)), inside), 0.0, 1.0)
        row, high, table = place.astype(np.int64) + 1, self.low + self.step * (self.count - 1), self.excess[str(nugget)]
        excess = (1 - share) * table[row] + share * table[row + 1]
        return row, share, excess + math.exp(high) * np.expm1(np.maximum(y - high, 0.0))

    def tables(self, points: list[acb], shift: arb) -> dict[str, np.ndarray]:
        """E e^(s(a − shift)) by nugget, for a = 0 and for each row, and by s."""
        atoms, found = [arb(a) - shift for a in self.atoms.tolist()], {key: [] for key in self.laws}
        for s in points:
            zero, values = (-s * shift).exp(), acb_poly([(s * a).exp() for a in atoms])
            for key, (weights, lost) in self.laws.items():
                rows = (values * acb_poly(weights)).coeffs()[2 * self.reach : 2 * self.reach + self.count]
                rows = [zero, *(row + lost * zero for row in rows)]
                bits = min(z.rel_accuracy_bits() for z in rows)  # the imaginary part matters where the real part is 1
                require(bits > (56 if s.real != 0 else 170), "the precision does not suffice")
                found[key].append(list(map(complex, rows)))
                require(min(map(abs, found[key][0])) > TINY, "the tilt is too large")
        return {key: np.array(columns).T.copy() for key, columns in found.items()}


class Law:
    """The law of T, discretised so that E(T − K)_+ (sign +1) or E(K − T)_+ (sign −1), plus `surplus`, can only rise."""

    def __init__(self, model: Model, grids: list[Any], strike: arb, sign: int) -> None:
        self.model, self.sign, outer = model, sign, model.before + model.right
        self.separators, self.nodes = ([low + step * k for k in range(n)] for low, step, n in map(grid, grids[:2]))
        for nodes, loads in ((self.separators, outer), (self.nodes, model.deviations)):
            require(len(nodes) > 1 or (nodes == [0] and all(y == 0 for y in loads)), "a grid has too few nodes")
        self.terms, self.top = Terms(grids[2], model.nuggets, strike, sign), arb(max(map(up, model.deviations)))
        self.weights, lost, s, x = np.ones(1), 0.0, np.array(self.separators), np.array(self.nodes)
        linked, left = model.rho[0] != 0, any(y != 0 for y in model.left)
        if len(s) > 1:
            weights, lost, _ = spread(s.tolist(), arb(0), arb(1), arb(0 if sign > 0 else max(map(up, outer))))
            self.weights = np.array(weights)
        means = [self._mean(one) * self._mean(two) for one, two in zip(model.left, model.right, strict=True)]
        factors = [sum(means[i:], arb(0)) if sign > 0 else strike for i in range(model.length)]
        law, kinds, self.places, surplus = self.weights if linked else np.ones(1), {}, [], arb(0)
        for i, rho in enumerate(model.rho):
            if (key := str(rho) if i > 0 else "start") not in kinds:
                kinds[key] = self._step(rho, self.nodes if i > 0 else self.separators if linked else [0.0])
            step, loss = kinds[key]
            surplus, law = surplus + float(law @ loss) * factors[i], law @ step
            one, two, three = (float(part[i]) for part in (model.left, model.right, model.deviations))
            parts = one * s[:, None, None] if left else np.zeros((1, 1, 1)), two * s[:, None], three * x
            smooth = (one**2 + two**2 + three**2) / 2
            size = sum(np.abs(part) for part in parts) + smooth + abs(self.terms.low) + 9999 * self.terms.step
            y = sum(parts) - smooth + sign * _SHIFT * size
            row, share, excess = self.terms.locate(y, model.nuggets[i])
            if sign > 0:
                surplus += float((self.weights if left else np.ones(1)) @ (excess @ law @ self.weights))
                for load, other in ((model.before[i], model.right[i]), (model.right[i], model.before[i])):
                    surplus += self._mean(other) * tail(s[-1] - load) if load != 0 else 0
            self.places.append((row, share[..., None], step))
        if sign < 0:
            surplus += strike * lost * (1 + arb(not model.closed and any(y != 0 for y in model.before)) / model.blocks)
        left_out = model.size * (1 - 2 * tail(model.left_out.sqrt() / 2))  # E(φ − 1)_+·E T, φ a factor shared by all
        self.surplus = surplus * model.blocks * (1 + arb(1e-10)) + left_out

    def _mean(self, load: arb) -> arb:
        """At least E e^(load·s − load²/2), for a separator that is spread, and at least 1."""
        terms = zip(self.weights.tolist(), self.separators, strict=True) if load != 0 else ()
        return sum((w * (load * s - load * load / 2).exp() for w, s in terms), arb(0)).max(arb(1))

    def _step(self, rho: arb, starts: list[float]) -> tuple[np.ndarray, np.ndarray]:
        """Weights from starts to nodes, and what is lost: P(−∞) for puts, E[e^(cx − c²/2); x > last] for calls."""
        c, last, variance = self.top, arb(self.nodes[-1]), 1 - rho * rho
        if rho == 1 or len(self.nodes) == 1:
            return np.eye(len(self.nodes)) if rho == 1 else np.ones((len(starts), 1)), np.zeros(len(starts))
        rows, root = [], variance.sqrt()
        require(self.sign < 0 or c <= last, "the last node is below the largest deviation")
        for x in starts:
            weights, lost, _ = spread(self.nodes, rho * x, root, arb(0) if self.sign > 0 else c)
            beyond = (c * rho * x + c * c * (variance - 1) / 2).exp() * tail((last - rho * x - c * variance) / root)
            rows.append([*weights, up(beyond) if self.sign > 0 else lost])
        return np.array(rows)[:, :-1].copy(), np.array(rows)[:, -1]

    def transform(self, points: list[acb], shift: arb) -> tuple[np.ndarray, float]:
        """E e^(s(T − n·shift)) for points of equal real part; a bound on the errors relative to the first value."""
        parts = [points[k : k + 16] for k in range(1, max(2, len(points)), 16)]  # to limit memory
        found = [self._transform([points[0], *part], shift)[min(k, 1) :] for k, part in enumerate(parts)]
        # Each rounding along a path is relative to a modulus that is at most the first value's.
        roundings = self.model.length * (len(self.nodes) + 16) + len(self.nodes) + 5 * len(self.separators) + 32
        return np.concatenate(found), 1.02 * self.model.blocks * roundings * UNIT

    def _transform(self, points: list[acb], shift: arb) -> np.ndarray:
        model, tables = self.model, self.terms.tables(points, shift)
        values = np.ones((*self.places[0][0].shape, len(points)), dtype=np.complex128)
        for nugget, rho, (row, share, step) in list(zip(model.nuggets, model.rho, self.places, strict=True))[::-1]:
            table = tables[str(nugget)]
            values *= (1 - share + 2 * UNIT) * table[row] + share * table[row + 1]
            values[..., 0] += TINY  # more than what underflows
            values = np.matmul(step, values.view(np.float64)).view(np.complex128) if rho != 1 else values
            values[..., 0] += TINY
        # Left separator × right separator × start × point: the first or the third has one value.
        block = (np.moveaxis(values, 2, 0)[:, 0] if len(values) == 1 else values[:, :, 0]) * self.weights[:, None]
        require(np.all(np.isfinite(block)), "the transform leaves the range of double precision")
        if len(block) == 1:  # blocks are independent
            return np.multiply.reduce([block[0].sum(axis=0)] * model.blocks)
        matrices, product = np.moveaxis(block, -1, 0).copy(), np.eye(len(self.weights))
        for _ in range(model.blocks):
            product = product @ matrices
            product[0] += TINY
        return np.trace(product, axis1=1, axis2=2) if model.closed else (self.weights @ product).sum(axis=1)


def chain(proof: Any, gram: Gram, sigma: arb, epsilon: arb, remove: bool) -> arb:
    """δ(ε) of the model, by Poisson's formula: with s_k = θ + 2πik/L, Σ M(s_k)/s_k² = L·Σ_m e^(θLm)·option(K ± mL)."""
    given, *grids, inversion = only("proof", proof, "model", "separators", "nodes", "terms", "inversion")
    option, *rest, count = only("inversion", inversion, "option", "tilt", "period", "smoothing", "frequencies")
    require(option == "put" or (option == "call" and remove), "the option is unknown, or not for this direction")
    theta, length, eta = (arb(number("inversion", x, 1e-100)) for x in rest)
    model, sign, side = Model(given, gram, sigma), 1 if remove else -1, 1 if option == "call" else -1
    n, strike, gap = model.size, model.size * (sign * epsilon).exp(), 2 * arb.pi() / length
    law = Law(model, grids, strike, sign)
    points = [acb(theta, gap * k) for k in range(number("frequencies", count, 1, 2**20, True))]
    moments, error = law.transform([side * s for s in points], strike / n)
    top, total = arb(float(moments[0].real)) * (1 + arb(2 * error)), arb(0)
    for k, (s, moment) in enumerate(zip(points, moments.tolist(), strict=True)):
        damping = (eta * eta * s * s / 2).exp() / (s * s)
        total += (2 if k else 1) * ((acb(moment) * damping).real + top * arb(error) * abs(damping))
    omega, tiny = gap * count, 1e-25 / up(strike)  # |M(s)| ≤ M(θ) at the frequencies from ω on
    first = (eta * eta * (theta * theta - omega * omega) / 2).exp() / (theta * theta + omega * omega)
    total += 2 * top * first / (1 - (-eta * eta * omega * gap).exp())
    # Mass and mean of the discretised measure, off the transform at an argument whose square vanishes beside 1.
    (zero,), error = law.transform([acb(0, tiny)], arb(0))
    mass, mean = (arb(float(x)) * (1 + arb(0, 2 * error)) for x in (zero.real, zero.imag / tiny))
    drift = mean - strike * mass
    for m in range(1, 60):
        inside = (m * length * mass + side * drift).lower()
        total -= length * (-m * theta * length).exp() * inside if inside > 0 else 0
    value = total / length + law.surplus + (drift if remove and option == "put" else 0)
    return value / n if remove else value * epsilon.exp() / n
