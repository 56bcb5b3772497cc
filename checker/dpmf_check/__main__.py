"""`python -m dpmf_check file.json` says "holds", or why a certificate does not, and then exits with status 1."""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from flint import arb

from dpmf_check.balls import Rejected, number, only, require
from dpmf_check.cascade import cascade
from dpmf_check.chain import chain
from dpmf_check.gram import Gram, gaussian, lattice
from dpmf_check.moments import moments

PROOFS = {"gaussian": gaussian, "lattice": lattice, "chain": chain, "cascade": cascade, "moments": moments}


def digest(certificate: dict[str, Any]) -> str:
    """SHA-256 of every field but the digest itself, as JSON with sorted keys and without spaces."""
    rest = {name: value for name, value in certificate.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def check(certificate: Any) -> list[str]:
    """What is proved, one line for each claim; raises `Rejected` with the reason where something is not."""
    names = "format", "mechanism", "noise_multiplier", "claims", "sha256"
    version, mechanism, noise, claims, signed = only("certificate", certificate, *names)
    require(version == "dpmf certificate 1" and claims, "the format is unknown, or there is no claim")
    require(signed == digest(certificate), "a field was changed: the digest does not match")
    gram, sigma, lines = Gram(mechanism), arb(number("noise_multiplier", noise, 1e-100)), []
    for claim in claims:
        direction, epsilon, delta, kind, proof = only("claim", claim, "direction", "epsilon", "delta", "kind", "proof")
        require(direction in ("remove", "add") and kind in PROOFS, "the direction or the kind of proof is unknown")
        number("epsilon", epsilon, 0.0, 1000.0), number("delta", delta, 1e-300, 1.0)
        value = PROOFS[kind](proof, gram, sigma, arb(epsilon), direction == "remove")
        lines.append(f"{direction}: δ({epsilon:g}) ≤ {float(value.upper()):.6e} is proved, {delta:.6e} is claimed")
        require(value <= arb(delta), lines[-1])
        require(value * 2 >= arb(delta), f"{lines[-1]}, which is not what this proof gives")
    return lines


def main(path: str) -> int:
    try:
        lines = ["holds", *check(json.loads(Path(path).read_text(encoding="utf-8")))]
    except Rejected as reason:
        lines = [f"does not hold: {reason}"]
    except (OSError, ArithmeticError, ValueError, TypeError, LookupError, AttributeError) as error:
        lines = [f"does not hold: it cannot be followed ({error})"]
    print(*lines, sep="\n")
    return int(lines[0] != "holds")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]) if len(sys.argv) == 2 else "usage: python -m dpmf_check file.json")
