"""The chain accountant: correlated noise, both directions, every ε, without sampling (docs/tightness.md: how close).

δ(ε) is a call (remove) or a put (add) on a basket of log-normals with covariance G/σ², whose strike is e^(±ε). The
steps are those of docs/theory/chain.md:

1. G is replaced by entrywise larger Gram matrices whose Gaussian fields are chains (`_majorants`, `_block_fits`).
2. The factors of such a field are spread onto nodes (`_spreads`), and the transform of the basket is then a product of
   small matrices (`_lines`, `_blocks`).
3. The option is read off the transform by an inversion with a one-sided error (`_inversion`).
4. `_bound` does 2 and 3 for every σ and ε; the least of the bounds of all majorants is the result.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from dpmf import budget, validation
from dpmf.accountants.chain import _majorants
from dpmf.accountants.chain._bound import ChainBound, Model, Unamplified
from dpmf.accountants.combined.least import Least, Part
from dpmf.accountants.protocol import Accountant, PreparedAccountant
from dpmf.mechanism import Mechanism


@dataclass(frozen=True)
class _Tuning:
    """Numbers that decide how majorants are fitted. All values give sound bounds.

    Attributes:
      dense_batches: the number of batches up to which covariances are held as b × b matrices.
      arrays_held: the number of b × b arrays that are held at a time while majorants are fitted.
    """

    dense_batches: int = 2000
    arrays_held: int = 10


_TUNING = _Tuning()


@dataclass(frozen=True)
class Chain(Accountant):
    """Options of the chain accountant.

    Attributes:
      discretisation_loss: the part of the noise multiplier that the spreads may cost; spacings are proportional to its
        square root. Values above 1 are clamped to 1.
      max_frequencies: the largest number of frequencies of one inversion; with fewer the bound gets looser, never
        wrong.
    """

    name: ClassVar[str] = "chain"
    summary: ClassVar[str] = "chains that dominate the noise, by transfer matrices; correlated noise, every ε"
    rests_on: ClassVar[str] = (
        "Kahane's inequality: entrywise larger Gram matrices dominate; transforms of chains inverted from above"
    )

    discretisation_loss: float = 0.005
    max_frequencies: int = 2048

    def __post_init__(self) -> None:
        validation.positive("discretisation_loss", self.discretisation_loss)
        validation.integer("max_frequencies", self.max_frequencies, at_least=64, at_most=2**24)

    def prepare(self, mechanism: Mechanism) -> PreparedAccountant:
        """Fit the majorants, when they are first needed.

        **Formal guarantees.** Every bound of the result is at least the true δ(ε) of the dominating pair. G, rounded up
        by its own rounding error, is replaced by Gram matrices that are larger in every entry, and E f(A) increases
        with every entry for convex f (Kahane's inequality), in both directions. The laws of the majorants are
        discretised from above (`hat_weights`, `TermTable`, `LineLaw`), inverted from above (`invert_tilted`,
        `invert_puts`, `invert_calls`), and all that is cut off is added. The smallest of several such bounds is
        returned; the Gaussian mechanism of the largest entry (no amplification, the same inequality) is one of them.
        """
        return Least(self.name, mechanism, [Part(self.name, lambda: self._bounds(mechanism))])

    def _bounds(self, mechanism: Mechanism) -> list[PreparedAccountant]:
        b = mechanism.batching.batches_per_epoch
        models: Iterable[tuple[str, Model]]
        if b > _TUNING.dense_batches:
            largest = float(mechanism.lags.max())
            models = budget.as_far_as_it_goes(_majorants.stationary_models(mechanism.lags))
        else:
            budget.claim(_TUNING.arrays_held * 8.0 * b * b)
            gram = mechanism.gram_upper()
            largest = float(gram.max())
            models = _majorants.models(gram)
        bounds: list[PreparedAccountant] = [
            ChainBound(
                mechanism, model, family=family, largest=largest,
                discretisation_loss=self.discretisation_loss, max_frequencies=self.max_frequencies,
            )
            for family, model in models
        ]  # fmt: skip
        return [*bounds, Unamplified(mechanism, largest)]
