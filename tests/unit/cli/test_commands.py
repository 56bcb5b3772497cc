"""The real command, as a user runs it: output, JSON, files, exit status, one line on failure."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from command_line import run

import dpmf

# Lower bounds are beside what is asked for here.
pytestmark = pytest.mark.usefixtures("coarse_lower_bounds")

SMALL = ["--strategy", "bsr", "--bandwidth", "2", "--epochs", "2", "--batches-per-epoch", "10"]
TINY = [*SMALL[:-1], "3"]  # for accountants that take long


def answer(*arguments: str) -> dict:
    done = run(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def mechanism() -> dpmf.Mechanism:
    return dpmf.Mechanism(dpmf.strategies.bsr(bandwidth=2), dpmf.BallsInBins(epochs=2, batches_per_epoch=10))


def test_calibrate_says_what_python_says(mechanism: dpmf.Mechanism) -> None:
    found = answer("calibrate", *SMALL, "--epsilon", "1", "--delta", "1e-5", "--accountant", "renyi")
    expected = dpmf.calibrate(mechanism, target_epsilon=1, target_delta=1e-5, accountant="renyi")
    assert found["noise_multiplier"] == expected.noise_multiplier
    assert found["delta"] <= 1e-5
    assert {"epsilon", "direction", "binding", "accountant", "details", "mechanism"} <= set(found)


def test_epsilon_and_delta_answer_each_other(mechanism: dpmf.Mechanism) -> None:
    epsilon = answer("epsilon", *SMALL, "--noise-multiplier", "2", "--delta", "1e-5", "--accountant", "renyi")[
        "epsilon"
    ]
    delta = answer("delta", *SMALL, "--noise-multiplier", "2", "--epsilon", str(epsilon), "--accountant", "renyi")[
        "delta"
    ]
    assert delta == pytest.approx(1e-5, rel=1e-3)


@pytest.mark.parametrize(
    "arguments",
    [
        ("calibrate", *TINY, "--epsilon", "2", "--delta", "1e-5"),
        ("epsilon", *TINY, "--noise-multiplier", "3", "--delta", "1e-5"),
        ("delta", *TINY, "--noise-multiplier", "3", "--epsilon", "1"),
        ("compare", *SMALL, "--delta", "1e-5", "--epsilon", "2,4", "--accountant", "renyi"),
        ("strategies",),
    ],
    ids=lambda a: a[0],
)
def test_tables_for_people(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    assert "│" in done.stdout
    assert "Traceback" not in done.stderr


def test_profile_prints_csv_and_writes_by_extension(tmp_path: Path) -> None:
    options = ("profile", *SMALL, "--noise-multiplier", "2", "--epsilon", "0.5,1,2", "--accountant", "renyi")
    printed = run(*options)
    rows = list(csv.DictReader(io.StringIO(printed.stdout)))
    assert [float(row["epsilon"]) for row in rows] == [0.5, 1, 2]
    assert all(float(r["delta"]) == max(float(r["delta_remove"]), float(r["delta_add"])) for r in rows)
    for suffix, magic in ((".csv", b"epsilon,"), (".json", b"{"), (".png", b"\x89PNG")):
        target = tmp_path / f"profile{suffix}"
        assert run(*options, "--output", str(target)).returncode == 0
        assert target.read_bytes().startswith(magic)
    assert json.loads((tmp_path / "profile.json").read_text())["epsilons"] == [0.5, 1, 2]


def test_compare_plots_and_reports_each_cell(tmp_path: Path) -> None:
    target = tmp_path / "compare.png"
    found = answer(
        "compare", *SMALL, "--delta", "1e-5", "--epsilon", "1,4", "--accountant", "renyi", "--plot", str(target)
    )  # fmt: skip
    assert target.read_bytes().startswith(b"\x89PNG")
    sigma = {cell["epsilon"]: cell["noise_multiplier"] for cell in found["cells"]}
    assert sigma[1.0] > sigma[4.0] > 0


def test_compare_shows_what_cannot_be_certified() -> None:
    found = answer(
        "compare", *SMALL, "--delta", "1e-5", "--epsilon", "0.2,4", "--accountant", "renyi", "--max-order", "25"
    )  # fmt: skip
    assert found["cells"][0]["noise_multiplier"] is None
    assert "0.3048" in found["cells"][0]["problem"]
    assert found["cells"][1]["noise_multiplier"] > 0


def test_files_and_cut_off_epochs(tmp_path: Path) -> None:
    coefficients = tmp_path / "c.csv"
    coefficients.write_text("1, 0.5\n")
    matrix = tmp_path / "c.npy"
    np.save(matrix, dpmf.strategies.bsr(2).matrix(8))
    common = [
        "--epochs",
        "2",
        "--batches-per-epoch",
        "5",
        "--iterations",
        "8",
        "--noise-multiplier",
        "2",
        "--epsilon",
        "1",
    ]
    answers = {
        answer("delta", "--strategy", "coefficients", "--file", str(coefficients), *common)["delta"],
        answer("delta", "--strategy", "bsr", "--bandwidth", "2", *common)["delta"],
    }
    assert len(answers) == 1
    dense = answer("delta", "--strategy", "matrix", "--file", str(matrix), *common)["delta"]
    assert dense == pytest.approx(answers.pop(), rel=1e-9)


def test_monte_carlo_says_that_it_estimates() -> None:
    options = ("--accountant", "monte-carlo", "--samples", "20000", "--seed", "1", "--epsilon", "2", "--delta", "1e-3")
    found = answer("calibrate", *SMALL, *options)
    assert found["kind"] == "estimate"
    assert found["details"]["remove"]["samples"] == 20000
    limit = answer("calibrate", *SMALL, *options, "--failure-probability", "0.01")
    assert "high-probability" in limit["kind"]
    assert limit["noise_multiplier"] > found["noise_multiplier"]


def test_help_and_version() -> None:
    assert "calibrate" in run("--help").stdout
    assert run("--version").stdout.strip() == f"dpmf {dpmf.__version__}"
    assert "--batches-per-epoch" in run("calibrate", "--help").stdout


@pytest.mark.parametrize(("options", "status"), [(("--epsilon", "8"), 0), (("--epsilon", "-1"), 2)])
def test_in_a_process_of_its_own(options: tuple[str, ...], status: int) -> None:
    """The other tests call the command line inside their own process."""
    command = ["calibrate", *SMALL, *options, "--delta", "1e-5", "--accountant", "renyi"]
    done = subprocess.run([sys.executable, "-m", "dpmf.cli", *command], capture_output=True, text=True, timeout=300)
    here = run(*command)
    assert (done.returncode, done.stdout, done.stderr) == (here.returncode, here.stdout, here.stderr)
    assert done.returncode == status


def test_help_loads_no_numerics() -> None:
    """The help must answer at once: nothing heavy may be imported for it."""
    probe = (
        "import sys, dpmf.cli\n"
        "try:\n    dpmf.cli.app(['--help'], standalone_mode=False)\nexcept SystemExit:\n    pass\n"
        "heavy = {'numpy', 'scipy', 'numba', 'matplotlib', 'jax', 'dp_accounting'} & set(sys.modules)\n"
        "print('HEAVY', sorted(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert "HEAVY []" in done.stdout


GOOD = {
    "--strategy": "bsr",
    "--bandwidth": "2",
    "--epochs": "2",
    "--batches-per-epoch": "10",
    "--epsilon": "1",
    "--delta": "1e-5",
}
BAD = [
    ({"--epsilon": "nan"}, "--epsilon"),
    ({"--epsilon": "-1"}, "--epsilon"),
    ({"--epsilon": "0"}, "--epsilon"),
    ({"--epsilon": "inf"}, "--epsilon"),
    ({"--epsilon": "many"}, "--epsilon"),
    ({"--delta": "1"}, "--delta"),
    ({"--delta": "0"}, "--delta"),
    ({"--delta": "nan"}, "--delta"),
    ({"--epochs": "0"}, "--epochs"),
    ({"--epochs": "-3"}, "--epochs"),
    ({"--epochs": "1.5"}, "--epochs"),
    ({"--batches-per-epoch": "0"}, "--batches-per-epoch"),
    ({"--iterations": "5"}, "--batches-per-epoch"),
    ({"--iterations": "0"}, "--iterations"),
    ({"--iterations": "21"}, "--iterations"),
    ({"--bandwidth": "0"}, "--bandwidth"),
    ({"--bandwidth": None}, "--bandwidth"),
    ({"--buffers": "3"}, "--buffers"),
    ({"--strategy": "sgd"}, "--strategy"),
    ({"--strategy": None}, "--strategy"),
    ({"--accountant": "guess"}, "--accountant"),
    ({"--direction": "sideways"}, "--direction"),
    ({"--accountant": "renyi", "--max-order": "1"}, "--max-order"),
    ({"--accountant": "renyi", "--work-budget": "nan"}, "--work-budget"),
    ({"--strategy": "coefficients", "--bandwidth": None, "--file": "/no/such/file.csv"}, "--file"),
    ({"--strategy": "matrix", "--bandwidth": None, "--file": "/no/such/file.npy"}, "--file"),
    ({"--unknown": "1"}, "--unknown"),
    ({"--accountant": "renyi", "--samples": "10"}, "--samples"),
    ({"--accountant": "lattice", "--max-order": "10"}, "--max-order"),
    ({"--accountant": "monte-carlo", "--samples": "0"}, "--samples"),
    ({"--accountant": "monte-carlo", "--failure-probability": "2"}, "--failure-probability"),
    ({"--accountant": "lattice"}, "lattice must be given uncorrelated noise"),
]


def refused(*arguments: str) -> str:
    done = run(*arguments)
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert done.stdout == ""
    line = done.stderr.strip()
    assert "\n" not in line
    assert line.startswith("dpmf: ")
    return line


@pytest.mark.parametrize(("change", "named"), BAD, ids=lambda v: str(v))
def test_bad_input_is_one_line(change: dict[str, str | None], named: str) -> None:
    options = {**GOOD, **change}
    arguments = [word for option, value in options.items() if value is not None for word in (option, value)]
    assert named in refused("calibrate", *arguments)


def test_zero_noise_is_refused() -> None:
    assert "--noise-multiplier" in refused("epsilon", *SMALL, "--noise-multiplier", "0", "--delta", "1e-5")
    assert "--noise-multiplier" in refused("delta", *SMALL, "--noise-multiplier", "nan", "--epsilon", "1")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (np.triu(np.ones((20, 20))), "triangular"),
        (np.tril(np.ones((19, 19))), "19"),
        (np.tril(-np.ones((20, 20))), "negative"),
        (np.tril(np.full((20, 20), np.nan)), "finite"),
        (np.ones(20), "square"),
    ],
    ids=["upper", "size", "negative", "nan", "vector"],
)
def test_bad_matrix_files_say_exactly_what_is_wrong(tmp_path: Path, content: np.ndarray, says: str) -> None:
    path = tmp_path / "m.npy"
    np.save(path, content)
    options = ("--strategy", "matrix", "--file", str(path), "--epochs", "2", "--batches-per-epoch", "10")
    line = refused("calibrate", *options, "--epsilon", "1", "--delta", "1e-5")
    assert says in line


def test_unreachable_target_is_one_line() -> None:
    line = refused(
        "calibrate", *SMALL, "--epsilon", "0.3", "--delta", "1e-5", "--accountant", "renyi", "--max-order", "25"
    )
    assert "0.3048" in line


@pytest.mark.parametrize("name", ["p.txt", "missing/p.csv", "."], ids=["suffix", "directory", "is-directory"])
def test_nothing_is_written_on_failure(tmp_path: Path, name: str) -> None:
    refused("profile", *SMALL, "--noise-multiplier", "2", "--output", str(tmp_path / name))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("command", "option"), [("compare", "--plot"), ("verify", "--certificate"), ("verify", "--output")]
)
def test_a_bad_path_is_refused_by_the_name_of_its_option(command: str, option: str) -> None:
    line = refused(command, *SMALL, "--epsilon", "2", "--delta", "1e-5", option, "p.exe")
    assert line.startswith(f"dpmf: {option} must end in ")


def test_a_bad_number_of_tuning_runs_is_refused_by_the_name_of_its_option() -> None:
    line = refused("tradeoff", *SMALL, "--noise-multiplier", "2", "--tuning-runs", "-1")
    assert line == "dpmf: --tuning-runs must be positive, got -1.0"


def test_a_failed_run_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "p.csv"
    target.write_text("before")
    refused("profile", *SMALL, "--noise-multiplier", "-2", "--output", str(target))
    assert target.read_text() == "before"


def test_what_is_worked_on_is_told_to_whoever_listens():
    import dpmf
    from dpmf import progress

    mechanism = dpmf.Mechanism(dpmf.strategies.bsr(2), dpmf.BallsInBins(1, 3))
    heard: list[str] = []
    with progress.listening(heard.append):
        for accountant in ("best", "auto"):
            dpmf.calibrate(mechanism, target_epsilon=2.0, target_delta=1e-5, accountant=accountant, with_lower=True)
        dpmf.epsilon(mechanism, noise_multiplier=2.0, delta=1e-5)
        dpmf.delta(mechanism, noise_multiplier=2.0, epsilon=1.0)
    assert {"preparing chain", "lower bound", "chain"} <= set(heard)
    known = len(heard)
    dpmf.delta(mechanism, noise_multiplier=2.0, epsilon=1.0)
    assert len(heard) == known


# --- batchings -------------------------------------------------------------------------------------------------------


def test_sizes_stand_for_batches_and_what_was_derived_is_said() -> None:
    sizes = ["--strategy", "dpsgd", "--epochs", "2", "--dataset-size", "950", "--batch-size", "100"]
    done = run("delta", *sizes, "--batching", "reshuffled", "--noise-multiplier", "1", "--epsilon", "2", "--no-lower")
    assert done.returncode == 0, done.stderr
    assert "10 batches per epoch, of 95 records on average; the number of records is used" in done.stderr
    assert done.stderr.count("\n") == 1
    assert "k=2, b=10, reshuffled" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epochs", "2"], "--batches-per-epoch must be given"),
        (["--epochs", "2", "--dataset-size", "10"], "--batches-per-epoch must be given"),
        (["--epochs", "2", "--batches-per-epoch", "4", "--batch-size", "2"], "--batches-per-epoch must be left out"),
        (["--epochs", "2", "--batches-per-epoch", "4", "--batching", "shuffled"], "--batching must be one of"),
        (["--epochs", "2", "--batches-per-epoch", "4", "--gap", "2"], "--gap applies only"),
        (["--epochs", "2", "--batches-per-epoch", "3", "--batching", "reshuffled", "--stride", "0"],
         "--stride must be at least 1"),
        (["--epochs", "2", "--batches-per-epoch", "4", "--batching", "cyclic", "--stride", "3"],
         "--stride must be a divisor of --batches-per-epoch = 4"),
        (["--epochs", "3", "--batches-per-epoch", "4", "--batching", "reshuffled", "--rethrow-every", "2"],
         "--rethrow-every must be a divisor"),
        (["--epochs", "2", "--batches-per-epoch", "4", "--batching", "poisson", "--strategy", "bsr", "--bandwidth",
          "2"], "cyclic Poisson of a period of at least 2"),
        (["--epochs", "2", "--batches-per-epoch", "4", "--batching", "poisson", "--accountant", "chain"],
         "--accountant must be"),
        (["--epochs", "2", "--batches-per-epoch", "4", "--batching", "reshuffled", "--accountant", "monte-carlo"],
         "--accountant must be one that gives guaranteed bounds"),
    ],
)  # fmt: skip
def test_bad_batchings_are_one_line(arguments: list[str], message: str) -> None:
    strategy = [] if "--strategy" in arguments else ["--strategy", "dpsgd"]
    done = run("delta", *strategy, *arguments, "--noise-multiplier", "1", "--epsilon", "2")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr
    assert message in done.stderr
