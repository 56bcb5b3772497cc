"""Certificates: an independent checker confirms them in ball arithmetic, and refuses those with any field changed."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paths
import pytest
from command_line import run
from flint import arb

import dpmf
from dpmf.accountants import Cascade, Chain, Moments
from dpmf.accountants.chain._bound import ChainBound
from dpmf.accountants.chain._majorants import stationary_models
from dpmf.accountants.combined.least import Least
from dpmf.accountants.protocol import DIRECTIONS
from dpmf.certificates import assembled, certificate, digest
from dpmf_check.__main__ import check, main
from dpmf_check.balls import Rejected
from dpmf_check.gram import Gram
from dpmf_check.moments import GivenMean, _put


def mechanism(strategy: Any, epochs: int, batches: int, iterations: int | None = None) -> dpmf.Mechanism:
    return dpmf.Mechanism(strategy, dpmf.BallsInBins(epochs, batches, iterations))


def signed(content: dict[str, Any]) -> dict[str, Any]:
    """The certificate with the digest of what it says now."""
    return {**content, "sha256": digest(content)}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where the numbers, words and truth values of a certificate are; of a long list, the first and the last."""
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*path, key))
    elif isinstance(value, list):
        for index in sorted({0, len(value) - 1} if value else ()):
            yield from places(value[index], (*path, index))
    else:
        yield path


def changed(content: dict[str, Any], path: tuple[Any, ...], by: float = 1.01) -> dict[str, Any]:
    """A copy in which what is there is another value of the same kind; of an object, all lists are scaled."""
    found = copy.deepcopy(content)
    inside = found
    for key in path[:-1]:
        inside = inside[key]
    old = inside[path[-1]]
    inside[path[-1]] = (
        {key: [by * x for x in part] if isinstance(part, list) else part for key, part in old.items()}
        if isinstance(old, dict)
        else not old if isinstance(old, bool)
        else old + 1 if isinstance(old, int)
        else (old * by if old else 1e-3) if isinstance(old, float)
        else old + " "
    )  # fmt: skip
    return found


EPSILON = 1.0
STRATEGIES = dpmf.strategies
MATRIX = STRATEGIES.matrix(np.tril(np.random.default_rng(0).uniform(0.1, 1.0, (12, 12))))
COARSE = Chain(discretisation_loss=0.3)  # few nodes, so that a check takes a second
FEW = Moments(spacing=0.3)


def of_family(which: dpmf.Mechanism, family: str, sigma: float) -> dict[str, Any]:
    """The certificate of one majorant, in both directions."""
    bounds: Sequence[Any] = Least.of(COARSE.prepare(which)).bounds()
    if family == "stationary":  # it is meant for thousands of batches
        model = next(model for name, model in stationary_models(which.lags) if name.startswith(family))
        bounds = [ChainBound(which, model, family=family, largest=1e9, discretisation_loss=0.3)]
    bound = next(bound for bound in bounds if getattr(bound, "family", "").startswith(family))
    return assembled(which, sigma, EPSILON, {way: bound.certificate(sigma, EPSILON, way) for way in DIRECTIONS})


def of_trees(which: dpmf.Mechanism, payoff: str, trees: int, sigma: float) -> dict[str, Any]:
    """The certificate of a cascade with such a payoff and so many trees."""
    bounds: Sequence[Any] = Least.of(Cascade(discretisation_loss=0.05).prepare(which)).bounds()
    proofs = (bound.certificate(sigma, EPSILON, "remove") for bound in bounds if hasattr(bound, "certificate"))
    fields = [proof for proof in proofs if proof is not None and proof.kind == "cascade"]
    proof = next(p for p in fields if p.fields["payoff"]["kind"] == payoff and len(p.fields["trees"]) == trees)
    return assembled(which, sigma, EPSILON, {"remove": proof})


def named(which: dpmf.Mechanism, accountant: str | Moments, sigma: float) -> dict[str, Any]:
    return certificate(which, noise_multiplier=sigma, epsilon=EPSILON, accountants=(accountant,))


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "gaussian": lambda: named(mechanism(STRATEGIES.bsr(bandwidth=3), 2, 6), "gaussian", 1.5),
    "gaussian, cut off": lambda: named(mechanism(STRATEGIES.bisr(bandwidth=2), 3, 5, 13), "gaussian", 2.0),
    "gaussian, matrix": lambda: named(mechanism(MATRIX, 3, 4), "gaussian", 6.0),
    "lattice": lambda: named(mechanism(STRATEGIES.dpsgd(), 2, 6), "lattice", 1.0),
    "lattice, cut off": lambda: named(mechanism(STRATEGIES.dpsgd(), 3, 5, 12), "lattice", 1.2),
    "line": lambda: of_family(mechanism(STRATEGIES.bisr(bandwidth=3), 1, 5), "line", 1.5),
    "line, matrix": lambda: of_family(mechanism(MATRIX, 1, 12), "line", 3.0),
    "ring": lambda: of_family(mechanism(STRATEGIES.bisr(bandwidth=2), 5, 8), "ring", 3.0),
    "separators": lambda: of_family(mechanism(STRATEGIES.bsr(bandwidth=2), 2, 8), "separators", 1.5),
    "separators, indices left out": lambda: of_family(mechanism(STRATEGIES.bsr(bandwidth=2), 2, 9), "separators", 1.5),
    "separators, line": lambda: of_family(mechanism(STRATEGIES.bsr(bandwidth=2), 1, 8), "separators", 1.2),
    "renewal": lambda: of_family(mechanism(STRATEGIES.bsr(bandwidth=4), 2, 12), "renewal", 2.0),
    "renewal, line": lambda: of_family(mechanism(STRATEGIES.bsr(bandwidth=4), 1, 12), "renewal", 1.5),
    "shared": lambda: of_family(mechanism(STRATEGIES.bisr(bandwidth=3), 2, 5), "shared", 2.0),
    "stationary": lambda: of_family(mechanism(STRATEGIES.bisr(bandwidth=3), 1, 8), "stationary", 1.5),
    "cascade, cubic": lambda: of_trees(mechanism(STRATEGIES.bsr(bandwidth=3), 2, 7), "cubic", 1, 2.0),
    "cascade, smoothed": lambda: of_trees(mechanism(STRATEGIES.bisr(bandwidth=4), 3, 7), "smoothed", 1, 3.0),
    "cascade, two trees": lambda: of_trees(mechanism(STRATEGIES.bisr(bandwidth=8), 3, 24), "smoothed", 2, 4.0),
    "moments": lambda: named(mechanism(STRATEGIES.bsr(bandwidth=3), 2, 6), FEW, 2.0),
    "moments, cut off": lambda: named(mechanism(STRATEGIES.bisr(bandwidth=4), 3, 7, 18), FEW, 2.5),
    "moments, matrix": lambda: named(mechanism(MATRIX, 1, 12), FEW, 3.0),
    "moments, many batches": lambda: named(mechanism(STRATEGIES.bisr(bandwidth=16), 4, 100), FEW, 4.0),
}


@pytest.fixture(scope="module", params=CASES)
def made(request: pytest.FixtureRequest) -> dict[str, Any]:
    return json.loads(json.dumps(CASES[request.param]()))


def test_the_checker_confirms_it(made: dict[str, Any]) -> None:
    assert [claim["direction"] for claim in made["claims"]] in (["remove", "add"], ["remove"])
    assert len(check(made)) == len(made["claims"])


def test_any_field_changed_is_refused(made: dict[str, Any]) -> None:
    for path in places(made):
        with pytest.raises(Rejected):
            check(changed(made, path))
    for name in made:
        with pytest.raises(Rejected):
            check({key: value for key, value in made.items() if key != name})
    with pytest.raises(Rejected, match="must have the fields"):
        check({**made, "note": "hello"})


def test_a_smaller_claim_is_refuted_whoever_signs_it(made: dict[str, Any]) -> None:
    for number in range(len(made["claims"])):
        with pytest.raises(Rejected, match="is proved"):
            check(signed(changed(made, ("claims", number, "delta"), 0.98)))
        with pytest.raises(Rejected):
            check(signed(changed(made, ("claims", number, "epsilon"), 0.98)))
    with pytest.raises(Rejected):
        check(signed(changed(made, ("noise_multiplier",), 0.98)))


def test_a_larger_strategy_is_refuted_whoever_signs_it(made: dict[str, Any]) -> None:
    path = next(p for p in places(made) if p[:3] == ("mechanism", "strategy", "entries"))
    with pytest.raises(Rejected):
        check(signed(changed(made, path, 100.0)))


WORSE = {
    "gaussian": [],
    "lattice": [(("entries", 0, 0), 0.9), (("step",), 3.0)],
    "chain": [
        (("model",), 0.9), (("model", "left_out"), 1.0), (("inversion", "tilt"), 3.0),
        (("inversion", "smoothing"), 3.0), (("inversion", "period"), 0.3), (("terms", "spacing"), 4.0),
    ],
    "cascade": [
        (("trees", 0, "weights", 1), 0.5), (("trees", 0, "step"), 3.0), (("payoff", "start"), 0.5),
        (("payoff", "cubic"), 0.9), (("payoff", "threshold"), 0.5),
    ],
    "moments": [
        (("nodes", "low"), 0.9), (("nodes", "spacing"), 1.1), (("nodes", "spacing"), 0.9), (("deep",), 1.0),
        (("nodes", "count"), 1.0),
    ],
}  # fmt: skip


def test_a_proof_made_worse_is_refuted_whoever_signs_it(made: dict[str, Any]) -> None:
    claim = made["claims"][0]
    for path, by in WORSE[claim["kind"]]:
        if path[0] == "payoff" and path[1] not in claim["proof"]["payoff"]:
            continue
        worse = changed(made, ("claims", 0, "proof", *path), by)
        with pytest.raises(Rejected):
            check(signed({**worse, "claims": worse["claims"][:1]}))


def test_polynomials_made_worse_are_refuted_whoever_signs_it() -> None:
    made = CASES["moments"]()
    for claim in made["claims"]:
        given = claim["proof"]["polynomials"]
        touching = [k for k, polynomial in enumerate(given) if "contacts" in polynomial]
        place = min(touching, key=lambda k: abs(sum(given[k]["contacts"])))  # the strike is about the mean: it counts
        left, right = given[place]["contacts"]
        for worse, complaint in (
            ({"contacts": [left * 3, right * 3]}, "is proved"),
            ({"contacts": [right, left]}, "both sides"),
            ({"contacts": [left]}, "a list of 2"),
            ({"contacts": [left, right], "zeros": []}, "must have the fields"),
            ({"zeros": []}, "is missing"),
            ({"zeros": [left, right]}, "not above the option"),
            ({"zeros": [right * (1 + 1e-9), right]}, "not above the option|is proved"),
            (given[: place + 1], "is proved"),  # lumping begins too early
            ([], "or none"),
        ):
            polynomials = worse if isinstance(worse, list) else [*given[:place], worse, *given[place + 1 :]]
            proof = {**claim["proof"], "polynomials": polynomials}
            with pytest.raises(Rejected, match=complaint):
                check(signed({**made, "claims": [{**claim, "proof": proof}]}))


def test_the_checkers_moments_are_those_of_all_tuples() -> None:
    """A sum over every tuple of indices of the expectation of Π(ξ − 1), against sums over graphs."""
    which = CASES["moments, cut off"]()
    law = GivenMean(Gram(which["mechanism"]), arb(2.5))
    terms = np.array([float(term) for term in law.terms(0.7)])
    _, lowest, known = law.at(0.7)
    weights, one_and_f = terms / terms.sum(), 1 + law.f
    for n, moment in zip((2, 3, 4), known, strict=True):
        exact = 0.0
        for chosen in itertools.product(range(law.b), repeat=n):
            for size in range(n + 1):
                for some in itertools.combinations(chosen, size):
                    product = np.prod([one_and_f[pair] for pair in itertools.combinations(some, 2)])
                    exact += (-1) ** (n - size) * product * weights[list(chosen)].prod()
        assert float(moment) >= exact * (1 - 1e-9)
        assert float(moment) <= exact * (1 + 1e-9 if n < 4 else 1.1)
    assert float(lowest) < 0


@pytest.mark.parametrize("kind", ["contacts", "zeros"])
def test_no_put_is_worth_more_than_the_checkers_polynomial(kind: str) -> None:
    rng, followed = np.random.default_rng(3), 0
    for _ in range(200):
        values, weights = rng.uniform(0.0, 1.0, 4) ** 3, rng.dirichlet(np.full(4, 0.5))
        values -= weights @ values
        lowest, strike = values.min() - rng.uniform(0.0, 0.1), rng.uniform(-0.3, 0.3)
        far = rng.uniform(0.0, 3.0, 2) * ([-0.1, 1.0] if kind == "contacts" else [1.0, 1.0])
        points = (strike + far).tolist()
        known = [arb(float(weights @ values**n)) for n in (2, 3, 4)]
        try:
            above = _put({kind: points}, arb(strike), arb(lowest), known)
        except Rejected:
            continue
        followed += 1
        assert float(above) >= float(weights @ np.maximum(strike - values, 0.0)) - 1e-12
    assert followed > 40


def test_a_claim_that_the_proof_does_not_give_is_refused(made: dict[str, Any]) -> None:
    with pytest.raises(Rejected, match="not what this proof gives"):
        check(signed(changed(made, ("claims", 0, "delta"), 2.5)))


def test_accountants_without_certificates_are_refused() -> None:
    which = mechanism(dpmf.strategies.bsr(bandwidth=2), 1, 4)
    with pytest.raises(ValueError, match="must have one with certificates for remove, renyi have none"):
        certificate(which, noise_multiplier=1.0, epsilon=1.0, accountants=("renyi",))


def test_the_command_writes_one_and_the_checker_reads_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "certificate.json"
    done = run(
        "verify", "--strategy", "bsr", "--bandwidth", "2", "--epochs", "2", "--batches-per-epoch", "4",
        "--epsilon", "1", "--delta", "1e-3", "--accountant", "gaussian,renyi", "--samples", "20000",
        "--certificate", str(path),
    )  # fmt: skip
    assert path.exists(), done.stderr
    assert f"certificate in {path}: remove, δ(1) ≤ " in done.stderr
    assert "by gaussian" in done.stderr
    assert main(str(path)) == 0
    assert capsys.readouterr().out.startswith("holds\nremove: δ(1) ≤ ")
    path.write_text(path.read_text().replace('"epsilon": 1.0', '"epsilon": 0.9'))
    assert main(str(path)) == 1
    assert capsys.readouterr().out == "does not hold: a field was changed: the digest does not match\n"
    path.write_text("{")
    assert main(str(path)) == 1
    assert "cannot be followed" in capsys.readouterr().out


def test_the_checker_is_small_and_knows_nothing_of_dpmf() -> None:
    files = sorted((paths.ROOT / "checker" / "dpmf_check").glob("*.py"))
    text = [path.read_text(encoding="utf-8") for path in files]
    assert len(files) == 7
    assert sum(part.count("\n") for part in text) <= 730
    assert not any("import dpmf\n" in part or "from dpmf." in part or "import scipy" in part for part in text)
