"""Certificates: an independent checker confirms them in ball arithmetic, and refuses those with any field changed."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paths
import pytest
from command_line import run

import dpmf
from dpmf.certificates import certificate, digest
from dpmf_check.__main__ import check, main
from dpmf_check.balls import Rejected


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
    """A copy in which what is there is another value of the same kind."""
    found = copy.deepcopy(content)
    inside = found
    for key in path[:-1]:
        inside = inside[key]
    old = inside[path[-1]]
    inside[path[-1]] = (
        not old if isinstance(old, bool)
        else old + 1 if isinstance(old, int)
        else (old * by if old else 1e-3) if isinstance(old, float)
        else old + " "
    )  # fmt: skip
    return found


MATRIX = np.tril(np.random.default_rng(0).uniform(0.1, 1.0, (12, 12)))
CASES = {
    "gaussian": (mechanism(dpmf.strategies.bsr(bandwidth=3), 2, 6), 1.5, ("gaussian",)),
    "gaussian, cut off": (mechanism(dpmf.strategies.bisr(bandwidth=2), 3, 5, 13), 2.0, ("gaussian",)),
    "gaussian, matrix": (mechanism(dpmf.strategies.matrix(MATRIX), 3, 4), 6.0, ("gaussian",)),
}


@pytest.fixture(scope="module", params=CASES)
def made(request: pytest.FixtureRequest) -> dict[str, Any]:
    which, sigma, accountants = CASES[request.param]
    return certificate(which, noise_multiplier=sigma, epsilon=1.0, accountants=accountants)


def test_the_checker_confirms_it(made: dict[str, Any]) -> None:
    assert [claim["direction"] for claim in made["claims"]] == ["remove", "add"]
    assert len(check(json.loads(json.dumps(made)))) == 2


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
        for path, by in (("delta", 0.98), ("epsilon", 0.98)):
            false = signed(changed(made, ("claims", number, path), by))
            with pytest.raises(Rejected, match="is proved"):
                check(false)
    with pytest.raises(Rejected):
        check(signed(changed(made, ("noise_multiplier",), 0.98)))


def test_a_larger_strategy_is_refuted_whoever_signs_it(made: dict[str, Any]) -> None:
    path = next(p for p in places(made) if p[:3] == ("mechanism", "strategy", "entries"))
    with pytest.raises(Rejected):
        check(signed(changed(made, path, 1.05)))


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
    assert len(files) == 6
    assert sum(part.count("\n") for part in text) <= 600
    assert not any("import dpmf\n" in part or "from dpmf." in part or "import scipy" in part for part in text)
