"""`dpmf tradeoff`: what any attack can achieve against a mechanism, and calibration to that.

(This module has no ``from __future__ import annotations``, because typer reads the annotations as objects.)
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpmf.cli.options import DirectionName, Json, accountant_from, mechanism_from, print_json, takes, working
from dpmf.errors import ArgumentError

if TYPE_CHECKING:
    from dpmf.accountants.protocol import Accountant
    from dpmf.mechanism import Mechanism

_WAYS = "--epsilon and --delta, --mu, or --true-positive-rate and --false-positive-rate"


@takes(mechanism_from, accountant_from)
def tradeoff(
    mechanism: "Mechanism",
    accountant: "Accountant",
    *,
    noise_multiplier: Annotated[float | None, typer.Option(help="Noise multiplier σ.")] = None,
    epsilon: Annotated[float | None, typer.Option(help="Calibrate to ε, with --delta.")] = None,
    delta: Annotated[float | None, typer.Option(help="δ of the guarantee. [default: 1e-5 in the text]")] = None,
    mu: Annotated[float | None, typer.Option(help="Calibrate to μ-Gaussian DP.")] = None,
    true_positive_rate: Annotated[
        float | None, typer.Option(help="Calibrate so that no attack exceeds this, with --false-positive-rate.")
    ] = None,
    false_positive_rate: Annotated[float | None, typer.Option(help="False-positive rate of the attacks.")] = None,
    slack: Annotated[float, typer.Option(help="Probability up to which μ holds.")] = 1e-9,
    renyi: Annotated[bool, typer.Option("--renyi", help="Also give Rényi divergences (fixed bins).")] = False,
    tuning_runs: Annotated[
        float | None, typer.Option(help="Also account for a search: the expected number of runs, the best is released.")
    ] = None,
    tuning_shape: Annotated[
        float, typer.Option(help="Their distribution: inf for Poisson, 1 geometric, 0 logarithmic.")
    ] = float("inf"),
    direction: DirectionName = "both",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A .csv, .json or .png file for the curve.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what any attack can achieve, or calibrate to it, and print a paragraph for a paper."""
    import dpmf
    from dpmf import attack_report, report, targets, tuning, validation
    from dpmf.formatting import upper
    from dpmf.paper import statement

    if output is not None:
        report.checked_output(output, attack_report.SUFFIXES)
    options: dict[str, Any] = {"accountant": accountant, "direction": direction, "slack": slack}
    asked = (
        noise_multiplier is not None,
        epsilon is not None,
        mu is not None,
        true_positive_rate is not None or false_positive_rate is not None,
    )
    if sum(asked) != 1 or (asked[3] and (true_positive_rate is None or false_positive_rate is None)):
        raise ArgumentError("noise_multiplier", f"must be given, or one target: {_WAYS}")
    if epsilon is not None and delta is None:
        raise ArgumentError("delta", "must be given with --epsilon")
    if tuning_runs is not None:
        validation.positive("mean", tuning_runs)  # before the work on the curve
    level = 1e-5 if delta is None else delta
    with working("bounding what attacks can achieve"):
        if epsilon is not None:
            noise_multiplier = dpmf.calibrate(
                mechanism, target_epsilon=epsilon, target_delta=level, accountant=accountant, direction=direction
            ).noise_multiplier
        if mu is not None:
            noise_multiplier = targets.calibrate_to_mu(mechanism, target_mu=mu, **options).noise_multiplier
        elif true_positive_rate is not None and false_positive_rate is not None:
            noise_multiplier = targets.calibrate_to_attack(
                mechanism, true_positive_rate=true_positive_rate, false_positive_rate=false_positive_rate, **options
            ).noise_multiplier
        assert noise_multiplier is not None
        if not asked[0]:
            noise_multiplier = float(upper(noise_multiplier))  # what is printed is what is certified
        rates = {0.001, 0.01, 0.1} | ({false_positive_rate} if false_positive_rate is not None else set())
        found = dpmf.tradeoff(
            mechanism, noise_multiplier=noise_multiplier, false_positive_rates=sorted(rates), renyi=renyi, **options
        )
        bound = dpmf.epsilon(
            mechanism, noise_multiplier=noise_multiplier, delta=level, accountant=accountant, direction=direction
        )
        tuned = None
        if tuning_runs is not None:
            tuned = tuning.total_epsilon(found, delta=level, mean=tuning_runs, shape=tuning_shape)
    text = str(statement(mechanism, bound, found)) + ("" if tuned is None else f" With tuning, {tuned}.")
    if output is not None:
        attack_report.write_tradeoff(output, mechanism, found)
    if as_json:
        total = None if tuned is None else tuned.to_dict()
        print_json({"mechanism": mechanism.name, **found.to_dict(), "tuned": total, "statement": text})
        return
    attack_report.print_tradeoff(mechanism, found)
    print(text)
    if output is not None:
        print(f"wrote {output}")
