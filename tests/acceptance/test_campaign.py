"""A slice of the soundness campaign, the truths it compares with, and its journal."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import fields
from pathlib import Path

import numpy as np
import oracles
import paths
import pytest
from waiting import until

from dpmf.accountants import ACCOUNTANTS, Best, Chain, Renyi, lattice
from dpmf.batching import Poisson
from dpmf.lower_bounds import lower_delta
from evidence import fingerprint
from soundness import __main__ as command
from soundness import (
    campaign,
    cases,
    draw_problem,
    faults,
    fuzz,
    page,
    parts,
    plans,
    problems,
    provenance,
    summary,
    true_delta,
)
from soundness.batchings import draw_batching_problem
from soundness.cases import Finding
from soundness.journal import Journal
from soundness.judge import fault
from soundness.truth import Truth, gaussian_delta, sampled_delta

ROOT = paths.ROOT
SLICE = 2000
SEED = 1  # not the one of the committed run
OURS = set(ACCOUNTANTS) - set(plans.NOT_OURS)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """2,000 cases of the light campaign: what takes long is asked less often there."""
    journal = Journal(tmp_path_factory.mktemp("campaign") / "journal.jsonl", campaign.header(SEED, light=True))
    for _ in campaign.run(journal, SEED, SLICE, light=True):
        pass
    journal.close()
    return list(journal.rows.values())


def test_no_violation_in_two_thousand_cases(rows: list[dict]) -> None:
    assert sum(len(row["findings"]) for row in rows) >= SLICE
    assert [violation for row in rows for violation in row["violations"]] == []


def test_the_slice_covers_what_it_should(rows: list[dict]) -> None:
    found = summary.summarise(rows)
    both = {"add", "remove"}
    asked = {name: set(ways) for name, ways in found["by_direction"].items()}
    assert {name: asked[name] for name in OURS | {"lower"}} == dict.fromkeys(OURS | {"lower"}, both)
    assert set(found["by_part"]) == set(parts.PARTS)
    assert {"closed form", "one factor", "quadrature, 1-d", "quadrature, 2-d", "sampling"} <= set(found["by_truth"])
    assert {"low rank", *problems.FAMILIES, "reshuffled", "thrown anew"} <= set(found["by_family"])
    assert any("oisson" in name for name in found["by_family"])
    assert any("with a stride" in name for name in found["by_family"])
    assert len(found["looseness"]["renyi"]) == 3
    assert sum(spread["cases"] for spread in found["looseness"]["gaussian"].values()) > 100
    asked = {kind for kinds in found["by_question"].values() for kind in kinds}
    assert asked >= {"delta", "epsilon", "calibrate", "profile", "cut short", "lower delta"}


# --- who is asked, and how much ------------------------------------------------------------------------------------

# What the whole campaign should hold of each.
LEAST = {
    "chain": 5000, "cascade": 5000, "moments": 5000, "own-bin": 5000, "conditional": 5000,
    "lattice": 3000, "lower": 3000, "best": 1500, "auto": 1500,
    "gaussian": 3000, "renyi": 3000,
}  # fmt: skip


def test_every_accountant_will_have_its_share_of_the_campaign() -> None:
    """Counted from the plans for a part of the campaign, without asking anybody; profiles and the like come on top."""
    count = Counter[str]()
    for index in range(400):
        if (part := parts.part_of(index)) not in ("fixed bins", "batchings"):
            continue
        problem = (draw_problem if part == "fixed bins" else draw_batching_problem)(0, index)
        throws = not isinstance(problem.mechanism.batching, Poisson)
        correlated = throws and lattice.uncorrelated_diagonal(problem.mechanism.throw) is None
        for accountant, plan, _ in plans.accountants_for(problem, 0):
            if not (accountant.name == "lattice" and correlated):
                count[accountant.name] += 2 * len(problem.epsilons[: plan.epsilons])
        if (plan := plans.lower_plan(problem, 0)) is not None:
            count["lower"] += 2 * len(problem.epsilons[: plan.epsilons])
    assert set(count) == set(LEAST) == OURS | {"lower"}
    whole = 100_000 / sum(count.values())
    assert {name: least for name, least in LEAST.items() if count[name] * whole < least} == {}
    assert max(count.values()) < 0.4 * sum(count.values())


def test_any_stretch_of_the_campaign_holds_every_accountant() -> None:
    for start in (0, 1000, 2500):
        asked = set()
        for index in range(start, start + 60):
            asked |= {accountant.name for accountant, *_ in plans.accountants_for(draw_problem(0, index), 0)}
        assert asked == OURS


def test_every_option_is_varied() -> None:
    """Both ends of the tables: accountants with options have them drawn, and every option takes several values."""
    rng = np.random.default_rng(0)
    for name in OURS:
        names = [field.name for field in fields(ACCOUNTANTS[name])]
        assert not names or name in plans.OPTIONS, name
        drawn = [plans.OPTIONS[name](rng, bins) for bins in (2, 8) for _ in range(60)] if names else []
        for option in names:
            assert len({str(getattr(one, option)) for one in drawn}) > 1, (name, option)


def test_a_budget_in_looks_ends_at_the_same_place_each_time() -> None:
    problem = next(p for p in (draw_problem(SEED, index) for index in range(50)) if p.size == "b=3")
    asker = cases._Asker(problem, SEED)
    for accountant in (Chain(), Renyi(work_budget=1e5), Best(renyi=Renyi(work_budget=1e5))):
        claims = [
            asker._cut_short(accountant, problem.epsilons[0], "remove", time_budget=steps).claim
            for steps in (7.0, 7.0, 1e9)
        ]
        assert claims[0] == claims[1] >= claims[2]


# --- the truths ----------------------------------------------------------------------------------------------------


def random_s(rng: np.random.Generator, b: int, rank: int, scale: float) -> np.ndarray:
    means = rng.random((rank, b)) * (rng.random((rank, b)) < 0.8)
    means[0, 0] += 0.1
    s = means.T @ means
    return s * scale / s.max()


@pytest.mark.parametrize("direction", ["remove", "add"])
@pytest.mark.parametrize(("b", "rank"), [(1, 1), (2, 2), (3, 2), (3, 3)])
def test_truths_are_those_of_the_other_quadrature(b: int, rank: int, direction: str) -> None:
    rng = np.random.default_rng([b, rank])
    compared = 0
    for scale in (1e-3, 0.1, 2.0) if b == 3 else (1e-3, 0.1, 2.0, 40.0):
        s = random_s(rng, b, rank, scale)
        for epsilon in (0.01, 1.0, 4.0):
            expected = oracles.gaussian_delta(s[0, 0], epsilon) if b == 1 else oracles.delta(s, epsilon, direction)
            truth = true_delta(s, epsilon, direction)
            if expected > 1e-12:
                assert truth.low <= expected * (1 + 1e-9)
                assert truth.high >= expected * (1 - 1e-9)
                assert truth.high <= truth.low * (1 + 1e-8)
                compared += 1
    assert compared >= 5


@pytest.mark.parametrize("direction", ["remove", "add"])
def test_many_bins_of_low_rank_are_few_bins(direction: str) -> None:
    """Every bin twice is the same mixture: 2b bins by quadrature against b bins by the other one."""
    rng = np.random.default_rng(5)
    s = random_s(rng, 3, 3, 2.0)
    twice = np.kron(s, np.ones((2, 2)))
    for epsilon in (0.1, 1.0, 3.0):
        expected = oracles.delta(s, epsilon, direction)
        truth = true_delta(twice, epsilon, direction)
        assert truth.low * (1 - 1e-8) <= expected <= truth.high * (1 + 1e-8)


@pytest.mark.parametrize("direction", ["remove", "add"])
@pytest.mark.parametrize(("b", "rank", "scale"), [(4, 4, 2.0), (4, 4, 0.1), (20, 2, 2.0), (30, 3, 0.3)])
def test_sampling_and_quadrature_agree(b: int, rank: int, scale: float, direction: str) -> None:
    rng = np.random.default_rng([b, rank, 9])
    s = random_s(rng, b, rank, scale)
    told = 0
    for epsilon in (0.05, 0.5, 1.5):
        exact, sampled = true_delta(s, epsilon, direction), sampled_delta(s, epsilon, direction, rng)
        assert sampled.low <= exact.high
        assert sampled.high >= exact.low
        told += sampled.sharp
    assert told >= 1


def test_sampling_near_one_allows_for_what_it_did_not_see() -> None:
    """1 − δ = 1.68e-8 comes from losses that no sample shows (slice, seed 1)."""
    s = np.diag([380.65069102743627, 380.65069102743627, 253.76712735162417])
    assert sampled_delta(s, 39.74447840053514, "remove", np.random.default_rng(0)).low <= 1 - 1.7e-8


def test_too_few_samples_say_nothing() -> None:
    rng = np.random.default_rng(0)
    assert sampled_delta(np.eye(6) * 1e-3, 30.0, "remove", rng, 1000) == Truth(0.0, 1.0, "sampling, too few")


def test_the_gaussian_mechanism_in_the_tail() -> None:
    assert gaussian_delta(0.0, 1.0) == 0
    assert gaussian_delta(1.0, 8.0) == pytest.approx(oracles.gaussian_delta(1.0, 8.0), rel=1e-6)
    assert 0 < gaussian_delta(1.0, 30.0) < 1e-150


# --- verdicts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "claim", "sound", "looseness"),
    [
        ("delta", 0.02, True, 2.0),
        ("delta", 0.00999, False, 0.999),
        ("delta", math.nan, False, math.nan),
        ("delta", 1.1, False, 110.0),
        ("delta", -0.1, False, -10.0),
        ("lower delta", 0.005, True, 2.0),
        ("lower delta", 0.0, True, math.inf),
        ("lower delta", 0.0101, False, 1 / 1.01),
    ],
)
def test_verdicts(kind: str, claim: float, sound: bool, looseness: float) -> None:
    finding = Finding("x", kind, "add", 1.0, claim, Truth(0.01, 0.01, "quadrature"))
    assert finding.sound is sound
    assert finding.looseness == pytest.approx(looseness, nan_ok=True)


def test_an_accountant_that_under_reports_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    from dpmf.accountants import Gaussian, gaussian

    for name in ("gaussian_delta", "gaussian_loss_delta"):
        honest = getattr(gaussian, name)
        monkeypatch.setattr(gaussian, name, lambda *a, honest=honest: honest(*a) * (1 - 1e-6))
    caught = [
        finding
        for index in range(40)
        for finding in cases._Asker(draw_problem(SEED, index), SEED).upper(
            Gaussian(), plans.PLANS["gaussian"], np.random.default_rng(index)
        )
        if not finding.sound
    ]
    assert len(caught) > 20


# --- the journal ---------------------------------------------------------------------------------------------------


def test_a_problem_is_the_same_each_time() -> None:
    for index in (0, 7, 31):
        first, second = draw_problem(SEED, index), draw_problem(SEED, index)
        assert first.mechanism.name == second.mechanism.name
        assert (first.s == second.s).all()
        assert first.epsilons == second.epsilons
    assert draw_problem(SEED, 0).delta != draw_problem(SEED, 1).delta != draw_problem(SEED + 1, 1).delta


def test_an_interrupted_campaign_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def row(seed: int, light: bool, part: str | None, index: int) -> dict:
        asked.append(index)
        finding = ["x", "delta", "add", "0.1", "closed form", "1"]
        return {"index": index, "part": "p", "family": "f", "size": "s", "findings": [finding] * 10, "violations": []}

    monkeypatch.setattr(campaign, "to_row", row)
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, campaign.header(3))
    for done, _ in campaign.run(journal, 3, 100):
        if done == 50:
            break
    journal.close()
    content = path.read_bytes()
    path.write_bytes(content[:-20])  # as a crash in the middle of a line leaves it
    journal = Journal(path, campaign.header(3))
    assert sorted(journal.rows) == [0, 1, 2, 3]
    assert [done for done, _ in campaign.run(journal, 3, 100)][-1] == 100
    journal.close()
    assert asked == [0, 1, 2, 3, 4, 4, 5, 6, 7, 8, 9]
    assert [json.loads(line)["index"] for line in path.read_text().splitlines()[1:]] == list(range(10))
    with pytest.raises(ValueError, match="seed 3, now 4"):
        Journal(path, campaign.header(4))


def test_rows_of_other_code_are_not_mixed_with_new_ones(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    before = campaign.header(0) | {"package": "of long ago"}
    journal = Journal(path, before)
    journal.add({"index": 0})
    journal.close()
    content = path.read_bytes()
    with pytest.raises(ValueError, match=r"other code .*package 'of long ago', now .*--restart"):
        Journal(path, campaign.header(0))
    assert path.read_bytes() == content
    journal = Journal(path, campaign.header(0), restart=True)
    assert journal.rows == {}
    journal.close()
    Journal(path, campaign.header(0)).close()


def test_two_runs_do_not_share_a_journal(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    journal = Journal(tmp_path / "journal.jsonl", campaign.header(0))
    journal.add({"index": 0})
    with pytest.raises(ValueError, match="in use by another run"):
        Journal(tmp_path / "journal.jsonl", campaign.header(0), restart=True)
    journal.close()
    assert list(Journal(tmp_path / "journal.jsonl", campaign.header(0)).rows) == [0]


def test_a_killed_fuzz_run_goes_on_in_two_processes(tmp_path: Path) -> None:
    """SIGKILL to a run with a pool: its workers end too, and the journal that is left gives the same counts."""
    path = tmp_path / "journal.jsonl"
    few = ["--share", "0.05", "--target", "strategy caches"]  # one block
    command = [sys.executable, "-m", "soundness", "fuzz", "--journal", str(path), "--jobs", "2", "--no-docs"]
    process = subprocess.Popen([*command, "--target", "strategy caches"], stdout=subprocess.DEVNULL, cwd=ROOT)
    until(lambda: path.exists() and path.read_bytes().count(b"\n") >= 3)
    process.kill()
    process.wait()

    def unlocked() -> bool:
        """No worker holds the lock any more. Asked here: every start of the command takes seconds."""
        try:
            Journal(path, fuzz.header(0)).close()
        except ValueError:
            return False
        return True

    until(unlocked)
    again = subprocess.run([*command, *few], cwd=ROOT, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    journal = Journal(path, fuzz.header(0))
    try:
        for block, row in journal.rows.items():
            assert row == json.loads(json.dumps(fuzz.to_row(0, str(block))))
    finally:
        journal.close()


# --- which code ----------------------------------------------------------------------------------------------------


def test_a_fingerprint_is_of_what_code_does(tmp_path: Path) -> None:
    def of(text: str) -> str:
        (tmp_path / "a.py").write_text(text)
        return fingerprint.of_files([tmp_path])

    plain = of("def f(x):\n    return x + 1\n")
    assert of('"""Text."""\n\n\ndef f(x):  # why\n    """More."""\n    return (x + 1)\n') == plain
    others = {
        of("def f(x):\n    return x + 2\n"),
        of("def f(y):\n    return y + 1\n"),
        of("def f(x): return x + True\n"),
    }
    assert len(others | {plain}) == 4
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert fingerprint.of_files([tmp_path]) not in others


def test_what_bounds_depend_on_is_fingerprinted() -> None:
    code = provenance.present()
    assert code["accounting"] != code["package"]
    assert set(code) == {"version", "accounting", "package"}
    assert {path.name for path in fingerprint.PACKAGE.iterdir()} >= set(fingerprint._NO_BOUNDS)
    campaign_needs = {"soundness.cases", "soundness.problems", "soundness.truth"}
    assert {name.removesuffix(".py").replace("/", ".") for name in campaign.HARNESS} >= campaign_needs


@pytest.mark.parametrize(
    ("codes", "said"),
    [
        (("a p", "a p", "a p"), "with the same code"),
        (("a p", "a q", "a p"), "same accounting code; other parts"),
        (("a p", "b q", "a p"), "different accounting code"),
        (("a p", None, "a p"), "did not record"),
    ],
)
def test_the_page_says_whether_the_code_changed(codes: tuple[str | None, ...], said: str) -> None:
    data = {}
    for part, code in zip(summary.PARTS, codes, strict=True):
        accounting, package = code.split() if code else ("", "")
        data[part] = {"code": {"version": "1", "accounting": accounting, "package": package}} if code else {}
    assert said in summary._code(data)


# --- every part records itself ---------------------------------------------------------------------------------------


@pytest.fixture
def docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The page and an empty data file, elsewhere."""
    monkeypatch.setattr(summary, "DATA", tmp_path / "soundness.json")
    monkeypatch.setattr(summary, "PAGE", tmp_path / "soundness.md")
    (tmp_path / "soundness.md").write_text((ROOT / "docs" / "soundness.md").read_text())
    return tmp_path


def recorded(part: str, path: Path) -> dict:
    """What was put into the data, once it is certain that the page says the same, and which code it was."""
    data = summary.load()
    assert path.read_text() == summary.filled(path.read_text(), data)
    assert data[part]["code"] == dict(provenance.present())
    return data[part]


def test_the_campaign_records_itself(docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finding = ["x", "delta", "add", "0.1", "closed form", "1.5"]
    row = {"part": "p", "family": "f", "size": "s", "findings": [finding] * 7, "violations": []}
    monkeypatch.setattr(campaign, "to_row", lambda seed, light, part, index: {"index": index, **row})
    monkeypatch.setattr(sys, "argv", ["", "--cases", "20", "--jobs", "1", "--journal", str(docs / "journal")])
    assert command.main() == 0
    assert recorded("campaign", docs / "soundness.md")["cases"] == 21
    assert "21 cases about 3 random mechanisms (seed 0): **0 violations**" in (docs / "soundness.md").read_text()


def test_fuzzing_records_itself_and_goes_on(docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "TARGETS", {"Python arguments": (fuzz.python_call, 60), "A target": (fuzz.event, 1)})
    arguments = ["--jobs", "1", "--journal", str(docs / "journal")]
    assert fuzz.main([*arguments, "--share", "0.5"]) == 0
    assert summary.load() == {}  # not the whole of it
    assert fuzz.main(arguments) == 0
    found = recorded("fuzz", docs / "soundness.md")
    assert found["targets"]["Python arguments"]["cases"] == 60
    monkeypatch.setattr(fuzz, "run", None)  # nothing is left to do
    assert fuzz.main(arguments) == 0
    assert recorded("fuzz", docs / "soundness.md") == found


def test_a_fault_that_was_found_is_recorded(docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "TARGETS", {"Python arguments": (lambda *_: fault("it broke"), 3)})
    assert fuzz.main(["--jobs", "1", "--journal", str(docs / "journal")]) == 1
    assert recorded("fuzz", docs / "soundness.md")["faults"] == [f"Python arguments {k}: it broke" for k in range(3)]
    assert "**3 faults**" in (docs / "soundness.md").read_text()


def test_kills_record_themselves_and_go_on(docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[tuple[str, int]] = []

    class Bench:
        def __init__(self, name: str, directory: Path) -> None:
            self.name = name

        def kill(self, number: int, seed: int) -> dict:
            if len(killed) == 120:
                raise KeyboardInterrupt
            killed.append((self.name, number))
            return {"kills": 1, "finished": 0, "lost": 0, "corrupt": 0, "problems": []}

    monkeypatch.setattr(faults, "Bench", Bench)
    monkeypatch.setattr(faults, "available", lambda job: True)
    arguments = ["--journal", str(docs / "journal")]
    assert faults.main(arguments) == 130
    assert summary.load() == {}
    killed.append(("interrupted", 0))  # so that it is not interrupted again
    assert faults.main(arguments) == 0
    assert sorted(set(killed)) == sorted(killed)
    runs = recorded("faults", docs / "soundness.md")["runs"]
    assert {run["kills"] for run in runs.values()} == {faults.KILLS}
    assert set(runs) == set(faults.JOBS)


def test_the_page_can_be_made_anew(docs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    committed = (ROOT / "docs" / "soundness.md").read_text()
    summary.DATA.write_text((ROOT / "docs" / "data" / "soundness.json").read_text())
    summary.PAGE.write_text(re.sub(r"(<!-- (?!end)\w+ -->\n).*?(<!-- end -->)", r"\1\2", committed, flags=re.DOTALL))
    assert summary.PAGE.read_text() != committed
    assert page.main([]) == 0
    assert summary.PAGE.read_text() == committed
    assert {line.split(":")[0] for line in capsys.readouterr().out.splitlines()[1:]} == set(summary.PARTS)


# --- what is committed ---------------------------------------------------------------------------------------------


def test_the_page_says_what_the_data_says() -> None:
    data, text = summary.load(), summary.PAGE.read_text()
    assert text == summary.filled(text, data)
    assert set(summary.blocks(data)) == set(re.findall(r"<!-- (\w+) -->\n", text)) - {"end"}


def test_the_committed_run_is_large_and_without_violations() -> None:
    found = summary.load()["campaign"]
    assert found["cases"] >= 100_000
    assert found["violations"] == []
    assert found["cases"] == sum(found["by_accountant"].values())


def test_the_committed_run_leaves_no_accountant_out() -> None:
    found = summary.load()["campaign"]
    assert {name: least for name, least in LEAST.items() if found["by_accountant"][name] < least} == {}
    for name in LEAST:
        ways = found["by_direction"][name]
        assert min(ways.get("add", 0), ways.get("remove", 0)) > LEAST[name] / 4, name


def test_the_committed_run_leaves_no_part_out() -> None:
    found = summary.load()["campaign"]
    assert set(found["by_part"]) == set(parts.PARTS)
    least = {"batchings": 20_000, "fixed bins": 20_000, "bridges": 800, "printed text": 800, "designs": 200}
    assert {part: number for part, number in least.items() if found["by_part"][part] < number} == {}


def test_the_truth_knows_how_small_it_can_be_computed():
    """Two nearly independent bins far out: 2.69392·10⁻³⁸ by 40-digit arithmetic, beyond the quadrature's reach.

    A lower bound of 2.69362·10⁻³⁸, correct, once counted as a violation.
    """
    s = np.array([[2.59107244, 0.01515594], [0.01515594, 2.5910547]])
    truth = true_delta(s, 21.070420830112703, "remove")
    assert truth.low <= 2.6939e-38 <= truth.high
    assert lower_delta(s, 1.0, 21.070420830112703, "remove") <= truth.high


def test_a_hang_is_a_violation():
    def forever() -> float:
        while True:
            time.sleep(0.01)

    with campaign._at_most(0.2):
        _, problem = cases.guarded(forever)
    assert problem == "TimeoutError: no answer within 0.2 s"
