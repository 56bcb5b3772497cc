"""The lines of Python and of the shell that give the numbers of a view."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dpmf.web.request import Request
from dpmf.web.view import CURVE_POINTS

_INTERVALS = CURVE_POINTS - 1


@dataclass(frozen=True)
class Recipe:
    """A mechanism and a target in the words of the command line."""

    strategy: str
    epochs: int
    batches_per_epoch: int
    epsilon: float
    delta: float
    iterations: int | None = None
    bandwidth: int | None = None
    buffers: int | None = None
    file: str | None = None
    coefficients: tuple[float, ...] = ()
    normalized: bool = False
    direction: str = "both"
    max_order: int | None = None
    noise_multiplier: float | None = None

    @classmethod
    def of(cls, request: Request) -> Recipe:
        file = "coefficients.csv" if request.coefficients else None
        return cls(**request.to_dict(), file=file)

    def shell(self, accountants: Sequence[str]) -> str:
        """`compare` for the noise multipliers, `report` for all of the view."""
        lines = []
        if self.coefficients:
            lines.append(f"echo {shlex.quote(','.join(f'{c!r}' for c in self.coefficients))} > coefficients.csv")
        for command in ("compare", "report"):
            words = ["dpmf", command, *self._options()]
            if self.max_order is not None:
                words += ["--max-order", str(self.max_order)]
            if command == "compare":
                words += ["--accountant", ",".join(accountants)]
            else:
                if self.noise_multiplier is not None:
                    words += ["--noise-multiplier", repr(self.noise_multiplier)]
                words += ["--output", "report.html"]
            lines.append(" ".join(shlex.quote(word) for word in words))
        return "\n".join(lines)

    def _options(self) -> list[str]:
        words = ["--strategy", self.strategy]
        for name, value in (
            ("bandwidth", self.bandwidth),
            ("buffers", self.buffers),
            ("file", self.file),
            ("epochs", self.epochs),
            ("batches-per-epoch", self.batches_per_epoch),
            ("iterations", self.iterations),
        ):
            if value is not None:
                words += [f"--{name}", str(value)]
        if self.normalized:
            words.append("--normalized")
        words += ["--epsilon", repr(self.epsilon), "--delta", repr(self.delta)]
        return words if self.direction == "both" else [*words, "--direction", self.direction]

    def python(self, accountants: Sequence[str], curve_noise: float | None) -> str:
        """The calibrations, the lower bound and the curves."""
        normalized = ".normalized()" if self.normalized else ""
        direction = "" if self.direction == "both" else f", direction={self.direction!r}"
        iterations = "" if self.iterations is None else f", iterations={self.iterations}"
        listed = "".join(f'"{name}", ' for name in accountants if name != "renyi")
        if "renyi" in accountants:
            order = "" if self.max_order is None else f"max_order={self.max_order}"
            listed += f"dpmf.accountants.Renyi({order})" if order else '"renyi"'
        lines = [
            "import dpmf",
            "",
            "mechanism = dpmf.Mechanism(",
            f"    dpmf.strategies.{self._strategy()}{normalized},",
            f"    dpmf.BallsInBins(epochs={self.epochs}, batches_per_epoch={self.batches_per_epoch}{iterations}),",
            ")",
            f"target = dict(target_epsilon={self.epsilon!r}, target_delta={self.delta!r}{direction})",
            f"for accountant in [{listed.removesuffix(', ')}]:",
            "    print(accountant, dpmf.calibrate(mechanism, **target, accountant=accountant).noise_multiplier)",
        ]
        if curve_noise is not None:
            top = repr(2 * self.epsilon)
            lines += [
                f"    at = dict(noise_multiplier={curve_noise!r}, epsilons=[i * {top} / {_INTERVALS} "
                f"for i in range({CURVE_POINTS})]{direction})",
                "    print(dpmf.profile(mechanism, **at, accountant=accountant).deltas)",
            ]
        lines.append('print(dpmf.calibrate(mechanism, **target, accountant="gaussian", with_lower=True).lower)')
        return "\n".join(lines)

    def _strategy(self) -> str:
        if self.coefficients:
            return f"coefficients([{', '.join(f'{c!r}' for c in self.coefficients)}])"
        argument: Any = {"bandwidth": self.bandwidth, "buffers": self.buffers}
        given = [f"{name}={value}" for name, value in argument.items() if value is not None]
        return f"{self.strategy}({repr(self.file) if self.file else ', '.join(given)})"
