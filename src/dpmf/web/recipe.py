"""The lines of Python and of the shell that give the numbers of a view."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from dpmf.web.request import Request
from dpmf.web.view import CURVE_POINTS


def shell(request: Request, accountants: Sequence[str]) -> str:
    """Return the shell commands: `compare` for the noise multipliers, `report` for the whole view."""
    lines, file = [], request.file
    if request.coefficients:
        file = "coefficients.csv"
        lines.append(f"echo {shlex.quote(','.join(map(repr, request.coefficients)))} > {file}")
    shared = ["--strategy", request.strategy]
    for name, value in (
        ("bandwidth", request.bandwidth),
        ("buffers", request.buffers),
        ("decay", request.decay),
        ("exponent", request.exponent),
        ("file", file),
        ("epochs", request.epochs),
        ("batches-per-epoch", request.batches_per_epoch),
        ("iterations", request.iterations),
        ("batching", None if request.batching == "fixed" else request.batching),
        ("rethrow-every", request.rethrow_every),
        ("stride", request.stride),
        ("gap", request.gap),
    ):
        if value is not None:
            shared += [f"--{name}", str(value)]
    if request.normalized:
        shared.append("--normalized")
    shared += ["--epsilon", repr(request.epsilon), "--delta", repr(request.delta)]
    if request.direction != "both":
        shared += ["--direction", request.direction]
    if request.max_order is not None:
        shared += ["--max-order", str(request.max_order)]
    noise = [] if request.noise_multiplier is None else ["--noise-multiplier", repr(request.noise_multiplier)]
    lines.append(shlex.join(["dpmf", "compare", *shared, "--accountant", ",".join(accountants)]))
    lines.append(shlex.join(["dpmf", "report", *shared, *noise, "--output", "report.html"]))
    return "\n".join(lines)


def python(request: Request, accountants: Sequence[str], curve_noise: float | None) -> str:
    """Return the Python code of the calibrations, the lower bound and the curves."""
    normalized = ".normalized()" if request.normalized else ""
    direction = "" if request.direction == "both" else f", direction={request.direction!r}"
    listed = [
        f"dpmf.accountants.Renyi(max_order={request.max_order})"
        if name == "renyi" and request.max_order
        else f'"{name}"'
        for name in accountants
    ]
    lines = [
        "import dpmf",
        "",
        "mechanism = dpmf.Mechanism(",
        f"    dpmf.strategies.{_strategy(request)}{normalized},",
        f"    dpmf.{request.batches()!r},",
        ")",
        f"target = dict(target_epsilon={request.epsilon!r}, target_delta={request.delta!r}{direction})",
        f"for accountant in [{', '.join(listed)}]:",
        "    print(accountant, dpmf.calibrate(mechanism, **target, accountant=accountant).noise_multiplier)",
    ]
    if curve_noise is not None:
        grid = f"[i * {2 * request.epsilon!r} / {CURVE_POINTS - 1} for i in range({CURVE_POINTS})]"
        lines += [
            f"    at = dict(noise_multiplier={curve_noise!r}, epsilons={grid}{direction})",
            "    print(dpmf.profile(mechanism, **at, accountant=accountant).deltas.tolist())",
        ]
    lines.append('print(dpmf.calibrate(mechanism, **target, accountant="gaussian", with_lower=True).lower)')
    return "\n".join(lines)


def _strategy(request: Request) -> str:
    """Return the expression that makes the strategy."""
    if request.coefficients or request.file:
        return f"{request.strategy}({list(request.coefficients) or request.file!r})"
    names = ("exponent", "decay", "bandwidth", "buffers")
    options = {name: getattr(request, name) for name in names}
    return f"{request.strategy}({', '.join(f'{o}={value}' for o, value in options.items() if value is not None)})"
