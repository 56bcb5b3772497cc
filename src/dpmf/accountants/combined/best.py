"""The smallest bound over dpmf's own deterministic accountants. Monte Carlo is never among them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from dpmf import validation
from dpmf.accountants.cascade import Cascade
from dpmf.accountants.chain import Chain
from dpmf.accountants.combined.least import combined
from dpmf.accountants.conditional import Conditional
from dpmf.accountants.gaussian import Gaussian
from dpmf.accountants.lattice import Lattice
from dpmf.accountants.moments import Moments
from dpmf.accountants.own_bin import OwnBin
from dpmf.accountants.protocol import Accountant, PreparedAccountant, Role, suited
from dpmf.accountants.renyi import Renyi
from dpmf.mechanism import Mechanism


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
    role: ClassVar[Role] = "combined"

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
        """Prepare every member.

        **Formal guarantees.** Every member bounds the same δ(ε) of the same direction; so does the smallest. Members
        are chosen by the mechanism and the target alone, and one that samples is refused.
        """
        if self.accountants is not None:
            return combined(self.name, mechanism, self.accountants)
        # These two take long and win at very small δ or large ε only: see `_Tuning` of the module `least`.
        return combined(self.name, mechanism, members(mechanism, self.renyi), seldom=(Renyi.name, Conditional.name))


def members(mechanism: Mechanism, renyi: Renyi) -> list[Accountant]:
    """The accountants that are worth asking about a mechanism, in the order in which to try them."""
    lattice = suited([Lattice()], mechanism)
    if lattice:
        return lattice  # it is within a fraction of a percent of the truth: nothing else can win by more
    # The first three are cheap: moments are the tightest at small ε and in the add direction, own-bin in the other one,
    # and the cascade serves any number of batches. The chain starts from what they found, and the rest only have to try
    # and beat those.
    return suited([Cascade(), Moments(), OwnBin(), Chain(), Gaussian(), renyi, Conditional()], mechanism)
