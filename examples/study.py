"""Does the error of a mechanism predict how well it trains? Many mechanisms, learning rates tuned the same way.

    python examples/study.py train  --task cifar10 --data cifar10.tar.xz --cells main:8,1,4,2 --output runs.csv
    python examples/study.py train  --task cifar10 --data cifar10.tar.xz --cells main/adamw:4 --seeds 10
    python examples/study.py train  --task digits --cells digits:1 --output runs.csv
    python examples/study.py report --picture docs/pictures/cifar10-study.png

`train` chooses a learning rate for each mechanism and ε on held-out records, then trains on everything and scores on
the test set with twenty seeds. Each finished run is a line in the output; a second call does only what is missing.
`report` prints what docs/training.md shows, from the files in docs/data: the runs, and the mechanisms with their σ and
where it comes from. CIFAR-10 wants a GPU; the digits take minutes on a CPU.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

DATA = Path(__file__).parent.parent / "docs" / "data"
MECHANISMS, RUNS = DATA / "cifar10-study-mechanisms.json", DATA / "cifar10-study-runs.csv"
# One grid for every mechanism. From a start that depends on ε only, the grid is climbed until the best rate of a
# mechanism lies inside what was tried for it, or at an end of the grid.
RATES = (0.033, 0.05, 0.075, 0.11, 0.17, 0.25, 0.38, 0.56, 0.84, 1.2, 1.8)
STARTS = {1.0: 0.11, 2.0: 0.17, 4.0: 0.25, 8.0: 0.38}
# Of other optimizers: momentum 0.9 makes steps ten times as long; those of Adam are measured in noise levels.
ADAM_RATES = tuple(0.0005 * 2**i for i in range(9))
ADAM_STARTS = {"adamw": 0.008, "corrected": 0.004}
DIGIT_RATES = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
TUNING_SEEDS = (1000, 1001)
MORE_TUNING_SEEDS = (1002, 1003)  # for the two best rates, with --refine
SEEDS = 20
COLUMNS = ("setting", "mechanism", "epsilon", "split", "learning_rate", "seed", "accuracy")

Cell = tuple[str, str, float]  # setting, name, ε
Scores = dict[Cell, dict[tuple[str, float], dict[int, float]]]  # by (split, learning rate), then seed


def read_mechanisms(path: Path) -> dict[Cell, dict[str, Any]]:
    return {(m["setting"], m["name"], m["epsilon"]): m for m in json.loads(path.read_text())}


def chosen(mechanisms: dict[Cell, dict[str, Any]], words: str) -> list[Cell]:
    """The cells that `setting[/optimizer]:ε,…[:mechanism,…]` names.

    Those with an optimizer are added to the mechanisms, with the setting `setting/optimizer`, so that their runs are
    kept apart from those with plain SGD.
    """
    setting, epsilons, names, *_ = [*words.split(":"), "", ""]
    setting, _, optimizer = setting.partition("/")
    wanted = [float(e) for e in epsilons.split(",")]
    cells = [c for c in mechanisms if c[0] == setting and c[2] in wanted and (not names or c[1] in names.split(","))]
    cells.sort(key=lambda cell: wanted.index(cell[2]))
    if optimizer:
        new = {(f"{setting}/{optimizer}", *cell[1:]): mechanisms[cell] for cell in cells}
        mechanisms |= {c: {**m, "setting": c[0], "optimizer": optimizer} for c, m in new.items()}
        cells = list(new)
    if not cells:
        raise ValueError(f"cells must name a setting, its ε and mechanisms that exist, got {words}")
    return cells


def grid(task: str, setting: str) -> tuple[tuple[float, ...], Callable[[float], float]]:
    """The learning rates to choose from, and where to begin for an ε."""
    optimizer = setting.partition("/")[2]
    if optimizer in ADAM_STARTS:
        return ADAM_RATES, lambda _: ADAM_STARTS[optimizer]
    share = 0.1 if optimizer == "momentum" else 1.0
    if task == "digits":
        return tuple(share * rate for rate in DIGIT_RATES), lambda _: share * 2.0
    return tuple(round(share * rate, 4) for rate in RATES), lambda epsilon: round(share * STARTS[epsilon], 4)


def write_mechanisms(path: Path, mechanisms: dict[Cell, dict[str, Any]]) -> None:
    path.write_text("[\n" + ",\n".join(json.dumps(m) for m in mechanisms.values()) + "\n]\n")


def read_runs(path: Path) -> Scores:
    scores: Scores = defaultdict(lambda: defaultdict(dict))
    if path.exists():
        with path.open() as file:
            for row in csv.DictReader(file):
                cell = row["setting"], row["mechanism"], float(row["epsilon"])
                scores[cell][row["split"], float(row["learning_rate"])][int(row["seed"])] = float(row["accuracy"])
    return scores


def held_out_means(scores: dict[tuple[str, float], dict[int, float]]) -> dict[float, float]:
    return {rate: sum(v.values()) / len(v) for (split, rate), v in scores.items() if split == "held-out" and v}


def tuned(scores: dict[tuple[str, float], dict[int, float]]) -> float | None:
    """The learning rate with the best mean on held-out records, of those tried with most seeds; None if none was."""
    means = held_out_means(scores)
    most = max((len(scores["held-out", rate]) for rate in means), default=0)
    best = [rate for rate in means if len(scores["held-out", rate]) == most]
    return max(best, key=lambda rate: (means[rate], -rate)) if best else None


def to_try(scores: dict[tuple[str, float], dict[int, float]], rates: tuple[float, ...], start: float) -> list[float]:
    """Rates to try next for one mechanism: the start and its neighbours, then what lies beside the best one."""
    best = tuned(scores)
    place = rates.index(start if best is None else best)
    near = rates[max(0, place - 1) : place + 2]
    return [rate for rate in near if len(scores.get(("held-out", rate), ())) < len(TUNING_SEEDS)]


class Training:
    """Runs of a task, written to the output as they end, until the time is up."""

    def __init__(self, task: Any, mechanisms: dict[Cell, dict[str, Any]], output: Path, until: float) -> None:
        self.task, self.mechanisms, self.output, self.until = task, mechanisms, output, until
        self.scores = read_runs(output)

    def perform(self, wanted: Iterable[tuple[Cell, str, float, int]]) -> bool:
        """Train what is missing of (cell, split, learning rate, seed); False if the time was up before the end."""
        from study_runs import Run

        todo = [w for w in wanted if w[3] not in self.scores[w[0]][w[1], w[2]]]
        cells = sorted({w[0] for w in todo})
        runs = [Run(cells.index(cell), rate, seed, split == "held-out") for cell, split, rate, seed in todo]
        begin, done = time.monotonic(), 0
        with self.output.open("a") as file:
            if file.tell() == 0:
                file.write(",".join(COLUMNS) + "\n")
            for run, accuracy in self.task.perform([self.mechanisms[c] for c in cells], runs):
                cell, split = cells[run.mechanism], "held-out" if run.held_out else "test"
                accuracy = round(accuracy, 4)  # as it is written: a second call must choose the same rates
                self.scores[cell][split, run.learning_rate][run.seed] = accuracy
                file.write(f"{','.join(map(str, cell))},{split},{run.learning_rate},{run.seed},{accuracy:.4f}\n")
                file.flush()
                done += 1
                if time.monotonic() > self.until:
                    print(f"time is up, {len(runs) - done} runs left", flush=True)
                    return False
        if done:
            print(f"{done} runs, {(time.monotonic() - begin) / done:.3f} s for one", flush=True)
        return True

    def tune(self, cells: list[Cell], rates: tuple[float, ...], start: Callable[[float], float]) -> bool:
        while wanted := [
            (cell, "held-out", rate, seed)
            for seed in TUNING_SEEDS for cell in cells for rate in to_try(self.scores[cell], rates, start(cell[2]))
        ]:  # fmt: skip
            if not self.perform(wanted):
                return False
        return True

    def refine(self, cells: list[Cell]) -> bool:
        """Try the two best rates of every mechanism with more seeds."""
        best = {cell: sorted(means := held_out_means(self.scores[cell]), key=means.__getitem__)[-2:] for cell in cells}
        return self.perform(
            [(c, "held-out", rate, seed) for seed in MORE_TUNING_SEEDS for c in cells for rate in best[c]]
        )

    def final(self, cells: list[Cell], seeds: int) -> bool:
        rates = {cell: rate for cell in cells if (rate := tuned(self.scores[cell])) is not None}
        return self.perform([(cell, "test", rate, seed) for seed in range(seeds) for cell, rate in rates.items()])


def train(arguments: argparse.Namespace) -> None:
    import study_runs

    until = time.monotonic() + arguments.seconds
    mechanisms = read_mechanisms(arguments.mechanisms)
    groups = [(words, chosen(mechanisms, words)) for words in arguments.cells]
    if arguments.task == "digits":
        task = study_runs.digits()
    else:
        import cifar10_data
        import torch

        data = cifar10_data.load(arguments.data)
        if arguments.records:
            data = cifar10_data.Cifar10(*(part[:: max(1, len(part) // arguments.records)] for part in data))
        task = study_runs.cifar10(*data, "cuda" if torch.cuda.is_available() else "cpu")
    training = Training(task, mechanisms, arguments.output, until)
    for group, cells in groups:
        print(f"{group}: {len(cells)} mechanisms", flush=True)
        rates, start = grid(arguments.task, cells[0][0])
        done = training.tune(cells, rates, start) and (not arguments.refine or training.refine(cells))
        if not (done and training.final(cells, arguments.seeds)):
            return


def prove(arguments: argparse.Namespace) -> None:
    """Calibrate σ for bins that are thrown once or in every epoch; it replaces one that was not proved, rounded up."""
    import dpmf
    from dpmf.formatting import upper

    mechanisms = read_mechanisms(arguments.mechanisms)
    for words in arguments.cells:
        for cell in chosen(mechanisms, words):
            found = mechanisms[cell]
            if found["batching"] not in ("fixed", "reshuffled") or "coefficients" not in found:
                raise ValueError(f"cells must name mechanisms with bins and coefficients, {cell[1]} is another one")
            every = 1 if found["batching"] == "reshuffled" else None
            batching = dpmf.BallsInBins(found["epochs"], found["batches"], rethrow_every=every)
            answer = dpmf.calibrate(
                dpmf.Mechanism(dpmf.strategies.coefficients(found["coefficients"]), batching),
                target_epsilon=cell[2],
                target_delta=found["delta"],
            )
            sigma = float(upper(answer.noise_multiplier))
            print(
                f"{cell[0]}:{cell[2]:g}:{cell[1]}: {found['sigma']:g} ({found['sigma_from']}), proved {sigma:g}",
                flush=True,
            )
            if not found["sigma_from"].startswith("proved"):
                found |= {"sigma": sigma, "sigma_from": "proved: dpmf"}
                write_mechanisms(arguments.mechanisms, mechanisms)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("train", help="tune and train what is missing")
    one.add_argument("--task", choices=("cifar10", "digits"), required=True)
    one.add_argument("--data", help="CIFAR-10: see cifar10_data.py")
    one.add_argument(
        "--cells", nargs="+", required=True, help="what to train, in this order: setting[/optimizer]:ε,…[:mechanism,…]"
    )
    one.add_argument("--output", type=Path, default=RUNS)
    one.add_argument("--mechanisms", type=Path, default=MECHANISMS)
    one.add_argument("--seeds", type=int, default=SEEDS)
    one.add_argument("--refine", action="store_true", help="compare the two best rates on four seeds, not two")
    one.add_argument("--seconds", type=float, default=float("inf"), help="stop after this long")
    one.add_argument("--records", type=int, help="only about so many training and test images, to try it out")
    three = commands.add_parser(
        "prove", help="the σ that dpmf proves, in place of one that was not proved; up to minutes each"
    )
    three.add_argument("--cells", nargs="+", required=True, help="setting:ε,…[:mechanism,…]")
    three.add_argument("--mechanisms", type=Path, default=MECHANISMS)
    two = commands.add_parser("report", help="the tables, the numbers in the text and the picture of docs/training.md")
    two.add_argument("--picture", type=Path)
    two.add_argument("--page", type=Path, help="a page whose tables are replaced")
    two.add_argument("--runs", type=Path, default=RUNS)
    two.add_argument("--mechanisms", type=Path, default=MECHANISMS)
    arguments = parser.parse_args()
    try:
        if arguments.command == "train":
            train(arguments)
        elif arguments.command == "prove":
            prove(arguments)
        else:
            import study_report

            study_report.report(
                read_mechanisms(arguments.mechanisms), read_runs(arguments.runs), arguments.picture, arguments.page
            )
    except (ValueError, ImportError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
