"""Certificates: files from which a bound can be checked without dpmf.

A certificate has the strategy, how the Gram matrix is made from it, and for each direction the smallest bound that has
a proof which the package `dpmf_check` can follow. docs/certificates.md describes the format and what is proved.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dpmf import validation
from dpmf.accountants.combined.least import Least
from dpmf.accountants.protocol import RELATIONS, Accountant, Direction, Proof, directions_of
from dpmf.accountants.registry import resolve, suitable
from dpmf.batching import BallsInBins
from dpmf.errors import ArgumentError
from dpmf.mechanism import Mechanism
from dpmf.run import Run, asked_about
from dpmf.strategies.base import ToeplitzStrategy

FORMAT = "dpmf certificate 1"
_MEANS = "m_i is the sum of the absolute columns i, i + b, i + 2b, ... of C"
_MOST_ENTRIES = 2_000_000  # numbers of a strategy in a file: tens of megabytes


def certificate(
    mechanism: Mechanism | Run,
    *,
    noise_multiplier: float | None = None,
    epsilon: float,
    direction: str = "both",
    accountants: Sequence[str | Accountant] | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """Write down the smallest bounds on δ(ε) that can be checked without dpmf.

    Args:
      mechanism: what the bounds are about: a mechanism, or a `Run` that does not cut its batches.
      noise_multiplier: σ for clipping norm 1 and the strategy as given; left out for a run.
      epsilon: the ε of the bounds.
      direction: the neighbouring relation: "both", "remove" or "add".
      accountants: whose bounds to consider; by default all of dpmf that suit the mechanism.
      progress: called with a description of each step before the step begins.

    Returns:
      The certificate, a dictionary that is ready for JSON. Its claims are upper bounds on δ(ε), one for each direction.
    """
    one_ways = directions_of(validation.choice("direction", direction, RELATIONS))
    mechanism, sigma, cut = asked_about(mechanism, noise_multiplier)
    epsilon = validation.non_negative("epsilon", epsilon)
    if cut is not None:
        advice = "certify run.mechanism, and add run.cut.charge(epsilon) to δ"
        raise ArgumentError("mechanism", f"must be a run whose batches are not cut: {advice}")
    if not mechanism.batching.fixed:
        raise ArgumentError("batching", f"must be fixed bins for a certificate, got {mechanism.batching.kind}")
    asked = suitable(mechanism, "bound") if accountants is None else [resolve(a) for a in accountants]
    found: dict[Direction, Proof] = {}
    for accountant in asked:
        for bound in Least.of(accountant.prepare(mechanism)).bounds():
            ask: Callable[..., Proof | None] = getattr(bound, "certificate", lambda *about: None)
            for way in one_ways:
                progress(f"{accountant.name}, {way}")
                proof = ask(sigma, epsilon, way)
                if proof is not None and (way not in found or proof.delta < found[way].delta):
                    found[way] = proof
    for way in one_ways:
        if way not in found:
            names = ", ".join(accountant.name for accountant in asked)
            raise ArgumentError("accountants", f"must have one with certificates for {way}, {names} have none")
    return assembled(mechanism, sigma, epsilon, {way: found[way] for way in one_ways})


def assembled(
    mechanism: Mechanism, noise_multiplier: float, epsilon: float, proofs: Mapping[Direction, Proof]
) -> dict[str, Any]:
    """The certificate with these proofs, one for each direction."""
    content = {
        "format": FORMAT,
        "mechanism": _described(mechanism),
        "noise_multiplier": noise_multiplier,
        "claims": [
            {"direction": way, "epsilon": epsilon, "delta": proof.delta, "kind": proof.kind, "proof": proof.fields}
            for way, proof in proofs.items()
        ],
    }
    return {**content, "sha256": digest(content)}


def digest(content: dict[str, Any]) -> str:
    """The SHA-256 of a certificate without its own field `sha256`, as JSON with sorted keys and without spaces."""
    rest = {name: value for name, value in content.items() if name != "sha256"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _described(mechanism: Mechanism) -> dict[str, Any]:
    """The strategy's entries, the batching, and how the means are formed from them."""
    strategy, batching = mechanism.strategy, mechanism.batching
    n = batching.iterations
    if not isinstance(batching, BallsInBins):
        raise validation.wrong("batching", "balls in bins for a certificate", batching)
    if isinstance(strategy, ToeplitzStrategy):
        column = strategy.strategy_coef(n)
        entries: list[Any] = column[: int(np.flatnonzero(column)[-1]) + 1].tolist()
        kind, size = "toeplitz", len(entries)
    else:
        kind, size = "matrix", n * n
    if size > _MOST_ENTRIES:
        raise ArgumentError(
            "strategy", f"must have at most {_MOST_ENTRIES} entries for a certificate, {strategy.name} has {size}"
        )
    if kind == "matrix":
        entries = [row[: t + 1].tolist() for t, row in enumerate(strategy.matrix(n))]
    return {
        "strategy": {"kind": kind, "entries": entries},
        "batching": {
            "kind": "balls in bins",
            "epochs": batching.epochs,
            "batches_per_epoch": batching.batches_per_epoch,
            "iterations": n,
        },
        "means": _MEANS,
    }
