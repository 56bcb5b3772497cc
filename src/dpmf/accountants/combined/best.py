"""The smallest bound over dpmf's own deterministic accountants. Monte Carlo is never among them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from dpmf import budget, validation
from dpmf.accountants.cascade import Cascade
from dpmf.accountants.chain import Chain
from dpmf.accountants.combined._stages import Staged, refuse_samples
from dpmf.accountants.conditional import Conditional
from dpmf.accountants.gaussian import Gaussian
from dpmf.accountants.lattice import Lattice, uncorrelated_diagonal
from dpmf.accountants.protocol import Accountant, Portfolio, PreparedAccountant
from dpmf.accountants.renyi import Renyi
from dpmf.mechanism import Mechanism

# N·b² up to which the tail bounds of conditional composition take seconds: with all temperatures, with AM-GM only.
_FULL_FAMILY = 3e7
_AM_GM = 3e8
# Batches an epoch up to which accountants that need the whole Gram matrix are worth their time.
_DENSE_BATCHES = 5000


@dataclass(frozen=True)
class Best(Accountant):
    """The smallest of several bounds; the result's details say whose it is.

    Attributes:
      renyi: the options of its Rényi accountant.
      accountants: exactly these accountants, instead of those that suit the mechanism.
    """

    name: ClassVar[str] = "best"
    summary: ClassVar[str] = "the smallest bound of the deterministic accountants that suit the mechanism"
    rests_on: ClassVar[str] = "the smallest of several bounds on the same number is a bound on it"

    renyi: Renyi = field(default_factory=Renyi)
    accountants: tuple[Accountant, ...] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.renyi, Renyi):
            raise validation.wrong("renyi", "a Renyi accountant", self.renyi)
        if self.accountants is not None and not (isinstance(self.accountants, tuple | list) and self.accountants):
            raise validation.wrong("accountants", "one or several accountants", self.accountants)
        for accountant in self.accountants or ():
            if not isinstance(accountant, Accountant):
                raise validation.wrong("accountants", "accountants", accountant)

    def prepare(self, mechanism: Mechanism) -> PreparedAccountant:
        """**Formal guarantees.** Every member bounds the same δ(ε) of the same direction; so does the smallest. Members
        are chosen by the mechanism alone, and one that samples is refused. Within a budget they are asked one after
        the other, closed forms first, and the smallest bound reached is returned."""
        chosen = self.accountants if self.accountants is not None else suited(mechanism, self.renyi)
        if budget.limited():
            first = () if self.accountants is not None else (Gaussian(),)
            return Staged(self.name, mechanism, tuple(dict.fromkeys((*first, *chosen))))
        members = [accountant.prepare(mechanism) for accountant in chosen]
        for member in members:
            refuse_samples(member)
        return Portfolio(self.name, mechanism, members)


def suited(mechanism: Mechanism, renyi: Renyi) -> tuple[Accountant, ...]:
    """dpmf's accountants that suit a mechanism, in the order in which to try them."""
    if uncorrelated_diagonal(mechanism) is not None:
        return (Lattice(),)  # within a fraction of a percent of the truth: nothing else can win by more
    b = mechanism.batching.batches_per_epoch
    # The cascade is cheap and rarely far off: the chain, nearly always the tightest, starts from what it found. The
    # others then only have to try and beat those.
    chosen: list[Accountant] = [Cascade(), Chain(), Gaussian()]
    if b <= _DENSE_BATCHES:
        chosen.append(renyi)
    work = mechanism.batching.iterations * b**2
    if work <= _AM_GM:
        chosen.append(Conditional(family="variational" if work <= _FULL_FAMILY else "am-gm"))
    return tuple(chosen)
