"""Design: what is considered, what is guaranteed, what is kept, how it reads."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from command_line import run
from forging import forge, values_in

import dpmf
from dpmf import api, budget, designs, store, strategies, workloads
from dpmf.accountants.combined.least import Least
from dpmf.accountants.protocol import Evaluation, PreparedAccountant
from dpmf.batching import BallsInBins, Poisson, reshuffled
from dpmf.designs import _search, shown
from dpmf.designs._candidates import candidates
from dpmf.designs.baseline import independent_noise

SHAPE = {"epochs": 2, "batches_per_epoch": 4}
FAST = ["--epochs", "2", "--batches-per-epoch", "4", "--epsilon", "4", "--delta", "1e-4", "--workers", "1"]


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DPMF_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        store.forget()
        yield
    store.forget()


@pytest.fixture(scope="module")
def found() -> designs.Design:
    return dpmf.design(
        **SHAPE, target_epsilon=4.0, target_delta=1e-4, workload=workloads.damped(5), bandwidths=(1, 2),
        batchings=("fixed", "cyclic", "poisson", "cyclic-poisson"),
    )  # fmt: skip


def test_the_best_has_a_guarantee_and_the_error_that_goes_with_it(found: designs.Design) -> None:
    best = found.best
    assert best.certified
    gaussian = best.mechanism.sensitivity * 1.1  # the Gaussian mechanism takes more than that at ε = 4
    assert 0.3 < best.noise_multiplier < gaussian
    expected = dpmf.error(best.mechanism, best.noise_multiplier, workloads.damped(5)).root_mean_square
    assert best.error == pytest.approx(expected)
    assert all(best.error <= option.error for option in found.others if option.certified)
    assert found.baseline is not None
    assert found.baseline.mechanism.strategy == strategies.dpsgd()
    assert found.gain == pytest.approx(best.error / found.baseline.error)
    assert found.complete
    assert found.problems == ()
    for option in (best, *found.others):
        assert option.lower is None or option.lower <= option.noise_multiplier


def test_a_design_goes_on_where_it_was_interrupted(found: designs.Design, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupts come in the third calibration. The next design begins there, and one that has ended does nothing."""

    def design() -> designs.Design:
        store.forget()
        return dpmf.design(
            **SHAPE, target_epsilon=4.0, target_delta=1e-4, workload=workloads.damped(5), bandwidths=(1, 2),
            batchings=("fixed", "cyclic", "poisson", "cyclic-poisson"),
        )  # fmt: skip

    calibrate = _search.api.calibrate
    asked: list[str] = []

    def interrupted(mechanism: dpmf.Mechanism, **options: object) -> object:
        asked.append(mechanism.name)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return calibrate(mechanism, **options)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        directory = tempfile.mkdtemp(dir=os.environ["DPMF_CACHE_DIR"])
        patch.setenv("DPMF_CACHE_DIR", directory)
        patch.setattr(_search.api, "calibrate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            design()
        first, asked[:] = asked[:], asked[:2]
        with pytest.raises(KeyboardInterrupt):
            design()
        assert asked == first
    monkeypatch.setattr(_search.api, "calibrate", None)
    monkeypatch.setattr(_search.api, "noise_near", None)
    assert design().to_dict() == found.to_dict()


def test_the_code_makes_the_mechanism(found: designs.Design) -> None:
    for option in (found.best, *found.others):
        names = {"dpmf": dpmf, "workload": found.workload}
        exec(f"batching = {option.batching_code()}\nstrategy = {option.strategy_code()}", names)
        made = dpmf.Mechanism(names["strategy"], names["batching"])  # type: ignore[arg-type]
        assert made.batching == option.mechanism.batching
        n = made.batching.iterations
        assert made.strategy.matrix(n) == pytest.approx(option.mechanism.strategy.matrix(n))
    assert "target_epsilon=4.0" in found.code()


@pytest.mark.parametrize("options", [{"buffers": 1}, {"family": "inverse", "bandwidth": 2}, {}], ids=str)
def test_code_for_fixed_bins(options: dict[str, object]) -> None:
    batching, workload = dpmf.BallsInBins(2, 8), workloads.momentum(0.5)
    strategy = strategies.optimised(batching, workload, (4.0, 1e-4), **options)  # type: ignore[arg-type]
    option = _search._option(dpmf.Mechanism(strategy, batching), workload, 1.0, None, certified=False)
    names: dict[str, object] = {"dpmf": dpmf}
    code = f"batching = {option.batching_code()}\nworkload = {designs.result.workload_code(workload)}"
    exec(f"{code}\nmade = {option.strategy_code()}", names)
    made = names["made"]
    assert isinstance(made, strategies.ToeplitzStrategy)
    assert made.strategy_coef(16) == pytest.approx(strategy.strategy_coef(16))
    assert option.needs.startswith("one assignment to bins")


def test_tables_and_pictures(
    found: designs.Design, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown.print_design(found)
    printed = capsys.readouterr().out
    assert "Least error for (4, 0.0001)-DP, damped sums, memory 5" in printed
    table = printed.partition("import dpmf")[0]
    assert max(map(len, table.splitlines())) <= 80
    assert "…" not in table
    for option in (found.best, *found.others):
        assert option.mechanism.strategy.name.removeprefix("optimised ") in table
    assert "make_private" in printed
    shown.design_plotter(tmp_path / "errors.png")(found)
    assert (tmp_path / "errors.png").read_bytes().startswith(b"\x89PNG")


def test_one_lower_bound_or_several(found: designs.Design) -> None:
    best, other = replace(found.best, lower=1.0), replace(found.best, lower=None)
    assert "Of the 2 mechanisms, 1 has a certified" in shown._how_far(replace(found, best=best, others=(other,)))
    assert "Of the 2 mechanisms, 2 have a certified" in shown._how_far(replace(found, best=best, others=(best,)))
    reached = replace(found.best, lower=found.best.noise_multiplier)
    assert shown._how_far(replace(found, best=reached, others=())).endswith("can make it better than the best.")
    open_ = replace(found, best=replace(reached, lower=reached.noise_multiplier / 1.00149), others=())
    assert "by more than a factor of 1.002." in shown._how_far(open_)


def test_a_search_leaves_no_lines_of_its_steps_on_stderr(cache_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dpmf.design(**SHAPE, target_epsilon=3.0, target_delta=1e-4, bandwidths=(2,), batchings=("cyclic-poisson",))
    assert capsys.readouterr().err == ""


def test_on_the_command_line(found: designs.Design) -> None:
    options = ["--workload", "damped", "--memory", "5", "--batching", "cyclic-poisson,poisson", "--bandwidth", "1,2"]
    done = run("design", *FAST, *options, "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert {"error", "noise_multiplier", "strategy", "coefficients", "batching", "copies"} <= set(answer["best"])
    assert [option["error"] for option in answer["others"]] == sorted(o["error"] for o in answer["others"])
    assert answer["best"]["copies"] <= 1
    done = run("design", *FAST, *options)
    assert done.returncode == 0
    assert "copies" in done.stdout


def test_what_is_considered() -> None:
    every = candidates(10, 100)
    assert len(every) == len(set(every))
    assert {c.family for c in every} == {"dpsgd", "banded", "geometric", "toeplitz", "inverse", "blt"}
    assert all(c.size is not None and c.size <= 4 for c in candidates(10, 100, copies=3) if c.family != "toeplitz")
    assert {c.batching for c in candidates(3, 10, batchings=["poisson"])} == {Poisson(3, 10)}
    assert not any(c.batching.throws > 1 for c in candidates(1, 10, batchings=["fixed", "reshuffled"]))
    assert {c.size for c in candidates(2, 50, batchings=["reshuffled"], bandwidths=[3])} == {3}
    # Bounds on two buffers say nothing against one, whose bounds are tighter.
    one, two, _ = (c for c in every if c.family == "blt")
    assert two.at_least_as_loose_as(one)
    assert not one.at_least_as_loose_as(two)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"batchings": ["shuffled"]}, "batching must be one of fixed, rethrown"),
        ({"bandwidths": [0]}, "bandwidth must be at least 1"),
        ({"bandwidths": [8], "copies": 3}, r"bandwidth must be at most copies \+ 1 = 4 somewhere"),
        ({"copies": -1}, "copies must be at least 0"),
        ({"target_delta": 0.0}, "target_delta must be strictly between 0 and 1"),
        ({"workload": "prefix"}, "workload must be a dpmf workload"),
        ({"time_budget": math.nan}, "time_budget must be finite"),
        ({"batches_per_epoch": None}, "batches_per_epoch must be given"),
        ({"batchings": ["rethrown"]}, "batching must leave a mechanism to consider"),
    ],
)
def test_refusals(change: dict[str, object], words: str) -> None:
    arguments = {**SHAPE, "target_epsilon": 4.0, "target_delta": 1e-4} | change
    with pytest.raises(ValueError, match=words):
        dpmf.design(**arguments)  # type: ignore[arg-type]


def test_refusals_on_the_command_line() -> None:
    for options, words in (
        (["--workload", "damped"], "dpmf: --memory must be given for workload damped\n"),
        (["--bandwidth", "2,x"], "dpmf: --bandwidth must be integers separated by commas, got 'x'\n"),
        (["--batching", "none"], "dpmf: --batching must be one of fixed"),
        (["--momentum", "0.9"], "dpmf: --workload must be given with --momentum\n"),
    ):
        done = run("design", *FAST, *options)
        assert done.returncode == 2
        assert done.stderr.startswith(words)


def test_errors_beside_noise_multipliers(tmp_path: Path) -> None:
    shape = ["--epochs", "2", "--batches-per-epoch", "4", "--delta", "1e-4"]
    damped = ["--workload", "damped", "--memory", "5"]
    done = run("calibrate", "--strategy", "bsr", "--bandwidth", "2", *shape, "--epsilon", "4", *damped, "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    mechanism = dpmf.Mechanism(strategies.bsr(2), dpmf.BallsInBins(2, 4))
    expected = dpmf.error(mechanism, answer["noise_multiplier"], workloads.damped(5))
    assert answer["error"] == expected._asdict()
    assert answer["baseline"].startswith("DP-SGD")
    done = run("calibrate", "--strategy", "bsr", "--bandwidth", "2", *shape, "--epsilon", "4", *damped)
    assert "relative to DP-SGD" in done.stdout
    refused = run("calibrate", "--strategy", "dpsgd", *shape, "--epsilon", "4", "--memory", "5")
    assert refused.stderr == "dpmf: --workload must be given with --memory\n"

    several = ["--strategy", "dpsgd,bsr", "--bandwidth", "2", "--batching", "fixed,poisson", *shape, "--epsilon", "4"]
    picture = tmp_path / "errors.png"
    done = run("compare", *several, *damped, "--json", "--plot", str(picture))
    assert done.returncode == 0, done.stderr
    assert "left out bsr, poisson" in done.stderr
    cells = {cell["mechanism"]: cell for cell in json.loads(done.stdout)["cells"]}
    assert set(cells) == {"DP-SGD, k=2, b=4", "DP-SGD, k=2, b=4, Poisson", "BSR(p=2), k=2, b=4"}
    assert cells["BSR(p=2), k=2, b=4"]["relative_error"] == pytest.approx(answer["relative_error"], rel=1e-3)
    assert min(cell["relative_error"] for cell in cells.values()) > 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    done = run("compare", *several, *damped)
    assert "relative to DP-SGD" in done.stdout


def test_verify_shows_the_error() -> None:
    done = run(
        "verify", "--strategy", "dpsgd", "--epochs", "2", "--batches-per-epoch", "4", "--epsilon", "4", "--delta",
        "1e-4", "--samples", "2000", "--workload", "prefix",
    )  # fmt: skip
    assert "Error of the noise in the model (prefix sums" in done.stdout


# --- what is read from disk is a hint --------------------------------------------------------------------------------

TARGET = (4.0, 1e-4)


def _task(step: str = "fine") -> _search._Task:
    candidate = next(c for c in candidates(2, 4, batchings=["fixed"], bandwidths=[2]) if c.family == "banded")
    return _search._Task(step, candidate, workloads.prefix(), TARGET, math.inf)  # type: ignore[arg-type]


def _certified(task: _search._Task) -> tuple[float, float | None]:
    store.forget()
    option = _search._certified(task).option
    assert option is not None
    return option.noise_multiplier, option.lower


@pytest.fixture(scope="module")
def proved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[float, float | None]]:
    """A directory with a fine answer, and the answer."""
    with pytest.MonkeyPatch.context() as patch:
        directory = tmp_path_factory.mktemp("proved")
        patch.setenv("DPMF_CACHE_DIR", str(directory))
        return directory, _certified(_task())


@pytest.fixture
def without_search(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[float]]:
    """Once it is called, searches for σ fail, and the σ at which checks evaluate bounds are noted."""

    def begin() -> list[float]:
        evaluated: list[float] = []

        def noting(bound: PreparedAccountant) -> PreparedAccountant:
            def noted(ask: Callable[..., Evaluation | None], sigma: float, *rest: object) -> Evaluation | None:
                found = ask(sigma, *rest)
                evaluated.extend([sigma] if found else [])  # there may be no rough bound
                return found

            for way in ("delta", "rough_delta"):
                setattr(bound, way, partial(noted, getattr(bound, way)))
            return bound

        def of(prepared: PreparedAccountant) -> SimpleNamespace:
            return SimpleNamespace(bounds=lambda: [noting(bound) for bound in Least.of(prepared).bounds()])

        monkeypatch.setattr(api, "Least", SimpleNamespace(of=of))
        for name in ("calibrate", "noise_near"):
            monkeypatch.setattr(api, name, None)
        monkeypatch.setattr(_search.lower_bounds, "lower_noise_multiplier", None)
        return evaluated

    return begin


@pytest.mark.parametrize("step", ["quick", "fine"])
def test_a_noise_multiplier_that_still_holds_costs_one_evaluation(
    cache_dir: Path, without_search: Callable[[], list[float]], step: str
) -> None:
    task = _task(step)
    found = _certified(task)
    (path,) = cache_dir.glob("certified-*.json")
    written = path.read_bytes()
    evaluated = without_search()
    assert _certified(task) == found
    assert evaluated == [found[0]]
    assert path.read_bytes() == written


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("noise_multiplier", lambda sigma: [sigma / 10]),
        ("noise_multiplier", lambda sigma: [0.97 * sigma]),  # what code with a fault might have written
        ("noise_multiplier", lambda sigma: [math.nan]),
        ("noise_multiplier", lambda sigma: [0.0]),
        ("noise_multiplier", lambda sigma: []),
        ("lower", lambda lower: [2 * lower]),
        ("lower", lambda lower: [math.nan]),
        ("place", lambda place: [99.0]),
        ("place", lambda place: [math.nan]),
        ("place", lambda place: [math.inf]),
        ("place", lambda place: [place, place, place]),
    ],
)
def test_an_edited_noise_multiplier_is_found_anew(
    cache_dir: Path,
    proved: tuple[Path, tuple[float, float | None]],
    name: str,
    change: Callable[[float], list[float]],
) -> None:
    directory, found = proved
    shutil.copytree(directory, cache_dir, dirs_exist_ok=True)
    (path,) = cache_dir.glob("certified-*.json")
    good = values_in(path)
    forge(path, lambda values: {**values, name: change(values[name][0])})
    assert _certified(_task()) == pytest.approx(found, rel=1e-9)
    assert values_in(path) == {name: pytest.approx(kept, rel=1e-9) for name, kept in good.items()}


def test_a_check_that_time_does_not_allow_keeps_the_file(cache_dir: Path) -> None:
    task = _task()
    found = _certified(task)
    (path,) = cache_dir.glob("certified-*.json")
    written = path.read_bytes()
    with pytest.raises(budget.OutOfTime):
        _certified(replace(task, ends=0.0))
    assert path.read_bytes() == written
    assert _certified(task) == found


def test_the_time_of_a_search_includes_checks(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time that ends within a check is said to be what a step was short of, and the search ends."""
    task = _task()
    _certified(task)

    def late(*_: object, **__: object) -> bool:
        raise budget.OutOfTime

    monkeypatch.setattr(api, "meets", late)
    store.forget()
    found = _search._work(task)
    assert found.option is None
    assert found.unfinished
    assert found.problem.endswith(": there was no time for it")


@pytest.mark.parametrize("batching", [Poisson(2, 4), reshuffled(2, 4), BallsInBins(1, 8)], ids=str)
def test_independent_noise_is_checked_where_it_is_read(
    cache_dir: Path, without_search: Callable[[], list[float]], batching: dpmf.batching.Batching
) -> None:
    def asked() -> float:
        store.forget()
        return independent_noise(dpmf.Mechanism(strategies.dpsgd(), batching), *TARGET)

    found = asked()
    (path,) = cache_dir.glob("independent-*.json")
    written = path.read_bytes()
    for factor in (0.99, math.nan):
        forge(path, lambda values, factor=factor: {name: [factor * kept[0]] for name, kept in values.items()})
        assert asked() == found
        assert path.read_bytes() == written
    evaluated = without_search()
    assert asked() == found
    assert evaluated == [found]
