"""The training examples: digits in a shortened form, CIFAR-10's loader, grid and table, the study of mechanisms."""

from __future__ import annotations

import csv
import importlib
import importlib.util
import io
import json
import os
import pickle
import re
import sys
import tarfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import paths
import pytest

import dpmf
from tests.decoders import decoder

torch = pytest.importorskip("torch")

ROOT = paths.ROOT
EXAMPLES, DATA = ROOT / "examples", ROOT / "docs" / "data"
RESULTS, SIGMA, TUNING = (DATA / f"cifar10-{name}.csv" for name in ("results", "sigma", "tuning"))


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    torch.set_num_threads(1)
    return importlib.import_module


@pytest.fixture
def run(example: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """A script in this process: a new interpreter would mostly import."""

    def call(script: str, *words: str) -> str:
        monkeypatch.setattr(sys, "argv", [script, *words])
        example(script).main()
        return capsys.readouterr().out

    return call


def test_adaptive_optimizers(example: Any) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("opacus")
    adaptive = example("adaptive")
    training, _, test = example("digits").data()
    mechanism = dpmf.Mechanism(dpmf.strategies.bsr(4), dpmf.BallsInBins(1, 20))
    for make, rates in adaptive.OPTIMIZERS.values():
        run = adaptive.train(mechanism, 0.3, make, rates[2], training, 0)
        assert example("digits").accuracy(run.model, test) > 0.2  # guessing is 10 %


def test_digits_with_jax(run: Any) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("optax")
    jax = pytest.importorskip("jax")
    jax.config.update("jax_disable_most_optimizations", True)  # it takes longer to compile than to train
    try:
        printed = run("jax_digits", "--epochs", "2", "--accountant", "gaussian", "--bandwidth", "1", "--epsilon", "30")
    finally:
        jax.config.update("jax_disable_most_optimizations", False)
    assert "(30, 0.0001)-differentially private" in printed
    assert float(printed.splitlines()[1].split()[-2]) > 30  # guessing is 10 %


@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_digits(run: Any, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("opacus")
    words = ["--epochs", "3", "--batches", "10", "--seeds", "1", "--rates", "1", "--accountant", "renyi"]
    printed = run("digits", *words, "--epsilon", "8", "--checkpoint", str(tmp_path / "run.dpmf"))
    scores = [float(line.split()[-2]) for line in printed.splitlines()[2:]]
    assert len(scores) == 3
    assert min(scores) > 15  # guessing is 10 %
    assert not list(tmp_path.iterdir())


def images(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, 3, 32, 32), dtype=np.uint8)


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    archive.addfile(info, io.BytesIO(content))


def _png(image: np.ndarray) -> bytes:
    from PIL import Image

    stream = io.BytesIO()
    Image.fromarray(image.transpose(1, 2, 0)).save(stream, "png")
    return stream.getvalue()


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 training and 20 test images in 10 classes, as files in folders in a tar."""
    path = tmp_path_factory.mktemp("cifar") / "data.tar.xz"
    with tarfile.open(path, "w:xz", preset=0) as tar:
        for split, n in (("train", 120), ("test", 20)):
            for i, image in enumerate(images(n, n)):
                _add(tar, f"cifar/{split}/class{i % 10}/{i:04}.png", _png(image))
    return path


def test_images_in_a_tar_and_in_a_directory(archive: Path, tmp_path: Path, example: Any) -> None:
    loader = example("cifar10_data")
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path)
    for source in (archive, tmp_path):
        data = loader.load(source)
        assert data.train_images.shape == (120, 3, 32, 32)
        assert data.test_labels.tolist() == sorted(2 * list(range(10)))
        by_class = images(20, 20)[np.argsort(np.arange(20) % 10, kind="stable")]
        assert np.array_equal(data.test_images, by_class)


def test_the_original_batches(tmp_path: Path, example: Any) -> None:
    loader = example("cifar10_data")
    with tarfile.open(tmp_path / "c.tar.gz", "w:gz") as tar:
        for i, name in enumerate([*(f"data_batch_{j}" for j in range(1, 6)), "test_batch"]):
            record = {b"data": images(4, i).reshape(4, -1), b"labels": [i % 10] * 4}
            _add(tar, f"cifar-10-batches-py/{name}", pickle.dumps(record, protocol=2))
    data = loader.load(tmp_path / "c.tar.gz")
    assert np.array_equal(data.train_images[4:8], images(4, 1))
    assert data.train_labels.tolist() == [i for i in range(5) for _ in range(4)]
    assert np.array_equal(data.test_images, images(4, 5))


def test_bad_data_is_one_line_and_runs_no_code(tmp_path: Path, example: Any) -> None:
    loader = example("cifar10_data")
    ran = tmp_path / "ran"

    class Payload:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(ran),)

    hostile, empty, broken, small = (tmp_path / name for name in ("hostile", "empty", "broken.tar", "small"))
    for directory in (hostile, empty, small / "train" / "a"):
        directory.mkdir(parents=True)
    (hostile / "data_batch_1").write_bytes(pickle.dumps({b"data": Payload()}))
    broken.write_bytes(b"no tar")
    (small / "train" / "a" / "1.png").write_bytes(_png(images(1, 0)[0][:, :8, :8]))
    for path in (hostile, empty, broken, small, tmp_path / "none"):
        with pytest.raises(ValueError, match="data must") as caught:
            loader.load(path)
        assert "\n" not in str(caught.value)
    assert not ran.exists()


def test_the_grid_sums_clipped_gradients(example: Any) -> None:
    grid: ModuleType = example("cifar10_grid")
    theta = 2 * grid.initial(0)
    torch.manual_seed(1)
    x, labels, mask = torch.randn(5, 3, 32, 32), torch.arange(5), torch.tensor([1.0, 1, 0, 1, 1])
    x[1] *= 0.001  # a gradient that is not clipped
    expected, norms = torch.zeros_like(theta), []
    for i in range(5):
        weights = theta.clone().requires_grad_()
        logits = grid.forward(grid.split(weights, torch.float32), x[i : i + 1])[0]
        (one,) = torch.autograd.grad(torch.nn.functional.cross_entropy(logits, labels[i : i + 1]), weights)
        norms.append(float(one.norm()))
        expected += mask[i] * one * min(1.0, grid.CLIP / (norms[-1] + 1e-6))
    assert min(norms) < grid.CLIP < max(norms)
    torch.testing.assert_close(grid.clipped_sum(theta, x, labels, mask), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["dpsgd", "bsr4", "bisr4"])
def test_the_grid_adds_the_noise_accounted_for(name: str, example: Any) -> None:
    """With no record in any batch, C times the steps is white."""
    grid, single = example("cifar10_grid"), example("cifar10")
    trainer = grid.Trainer(
        images(97, 0), np.zeros(97, dtype=np.int64), images(1, 1), np.zeros(1, dtype=np.int64), seeds=[0], device="cpu"
    )
    trainer.bins = {0: np.full(97, 200)}  # nobody is anywhere
    places = []
    step = trainer._step

    def recorded() -> None:
        places.append(trainer.theta.double().numpy().copy())
        step()

    trainer._step = recorded
    n, sigma = 8, 2.0
    trainer.run(grid.Run(name, 1.0, "best", sigma, 1.0, 0), n)
    places.append(trainer.theta.double().numpy().copy())
    noise = -np.diff(places, axis=0) * trainer.expected / (sigma * grid.CLIP)
    white = single.STRATEGIES[name].matrix(n) @ noise
    size = white.shape[1]
    covariance = white @ white.T / size
    assert np.abs(np.triu(covariance, 1)).max() < 5 * size**-0.5
    assert np.abs(np.diag(covariance) - 1).max() < 5 * (2 / size) ** 0.5


def test_both_ways_train_the_same_network(example: Any) -> None:
    grid, single = example("cifar10_grid"), example("cifar10")
    model = single.network()
    assert sum(p.numel() for p in model.parameters()) == len(grid.initial(0)) == 292_138
    x = torch.randn(2, 3, 32, 32)
    weights = [p.detach().permute(0, 2, 3, 1) if p.ndim == 4 else p.detach() for p in model.parameters()]
    torch.testing.assert_close(grid.forward(weights, x)[0], model(x))
    assert (single.EPOCHS, single.BATCHES, single.CLIP) == (grid.EPOCHS, grid.BATCHES, grid.CLIP)


def test_the_grid_goes_on_where_it_stopped(archive: Path, tmp_path: Path, example: Any, monkeypatch: Any) -> None:
    grid = example("cifar10_grid")
    monkeypatch.setattr(grid, "EPSILONS", (1.0,))
    monkeypatch.setattr(grid, "STRATEGIES", ("bsr4",))
    monkeypatch.setattr(grid, "LEARNING_RATES", (0.1, 0.2))
    monkeypatch.setattr(grid, "TRAINED_WITH", ("best",))
    monkeypatch.setattr(grid, "SEEDS", 1)
    done = tmp_path / "tuning.csv"
    words = ["grid", "tune", "--data", str(archive), "--sigma", str(SIGMA), "--iterations", "1", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", [*words, "--output", str(done), "--seconds", "-1"])
    grid.main()
    assert len(done.read_text().splitlines()) == 1
    monkeypatch.setattr(sys, "argv", [*words, "--output", str(done)])
    grid.main()
    first = done.read_text()
    assert len(first.splitlines()) == 3
    grid.main()
    assert done.read_text() == first
    words[1] = "final"
    monkeypatch.setattr(sys, "argv", [*words, "--tuned", str(done), "--output", str(tmp_path / "final.csv")])
    grid.main()
    assert len((tmp_path / "final.csv").read_text().splitlines()) == 2


@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_one_run_through_opacus(archive: Path, tmp_path: Path, run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("opacus")
    words = ["train", "--data", str(archive), "--strategy", "dpsgd", "--iterations", "2"]
    assert "iteration 2" in run("cifar10", *words, "--checkpoint", str(tmp_path / "c"))
    printed = run("cifar10", *words, "--checkpoint", str(tmp_path / "c"))
    assert "going on from iteration 2" in printed
    assert "iteration 4" in printed
    with pytest.raises(SystemExit) as stopped:
        run("cifar10", "train", "--data", str(tmp_path / "none"))
    assert stopped.value.code == 2
    assert "there is no" in capsys.readouterr().err


def test_the_page_shows_the_committed_results(example: Any) -> None:
    table = example("cifar10").table(RESULTS, SIGMA)
    page = (ROOT / "docs" / "training.md").read_text()
    (shown,) = re.findall(r"<!-- cifar10 -->\n(.*?)\n<!-- end -->", page, flags=re.DOTALL)
    assert shown == table
    most = example("cifar10").summary(RESULTS)
    least = most["least"], most["second largest"], most["largest gain of best over renyi"]
    assert f"gives up to {least[2]} points" in page
    assert f"{least[0]} to {least[1]} points elsewhere" in page
    assert f"within {most['largest distance of best and Monte Carlo']} points" in page
    gain = most["least gain of BISR over DP-SGD"], most["largest gain of BISR over DP-SGD"]
    assert f"BISR is {gain[0]} to {gain[1]} points better" in page
    with RESULTS.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 * 4 * 3 * 5
    tuned = example("cifar10_grid").best_rates(TUNING)
    sigma = example("cifar10_grid").read_sigma(SIGMA)
    for row in rows:
        epsilon = float(row["epsilon"])
        assert float(row["learning_rate"]) == tuned[row["strategy"], epsilon]
        assert float(row["sigma"]) == sigma[row["strategy"], row["accountant"], epsilon]
    # Tuning did not end at either end of the grid.
    rates = example("cifar10_grid").LEARNING_RATES
    assert all(rates[0] < rate < rates[-1] for rate in tuned.values())


BANDED = {"setting": "s", "name": "m", "epsilon": 1.0, "epochs": 3, "batches": 4, "sigma": 1.0}
BANDED |= {"batching": "reshuffled", "gap": 2, "coefficients": [1.0, 0.5, 0.3]}


def test_the_noise_of_the_study_is_that_of_the_strategy(example: Any) -> None:
    """It is settled in the gaps between throws."""
    runs = example("study_runs")
    mechanism = dpmf.Mechanism(dpmf.strategies.coefficients(BANDED["coefficients"]), dpmf.reshuffled(3, 4))
    np.testing.assert_allclose(runs.noise_rows(BANDED), decoder(mechanism), atol=1e-6)
    bisr = {**BANDED, "gap": 0, "inverse": dpmf.strategies.bisr(3).noising_coef(3).tolist()}
    np.testing.assert_allclose(runs.noise_rows(bisr), dpmf.strategies.bisr(3).inverse(12), atol=1e-6)


def test_the_batches_of_the_study(example: Any) -> None:
    runs = example("study_runs")
    thrown = {kind: runs.batches({**BANDED, "batching": kind}, 50, 0) for kind in ("fixed", "reshuffled", "poisson")}
    for kind in ("fixed", "reshuffled"):
        epochs = [thrown[kind][start : start + 4] for start in (0, 4, 8)]
        assert all(sorted(np.concatenate(epoch)) == list(range(50)) for epoch in epochs)
        same = all(np.array_equal(a, b) for a, b in zip(epochs[0], epochs[1], strict=True))
        assert same == (kind == "fixed")
    assert all(len(set(batch)) == len(batch) for batch in thrown["poisson"])
    assert 100 < sum(map(len, thrown["poisson"])) < 200  # 150 expected
    cyclic = runs.batches({**BANDED, "batching": "poisson", "period": 2}, 50, 0)
    assert not set(np.concatenate(cyclic[::2])) & set(np.concatenate(cyclic[1::2]))
    assert 100 < sum(map(len, cyclic)) < 200


def test_the_study_clips_gradients_of_digits(example: Any) -> None:
    pytest.importorskip("sklearn")
    task = example("study_runs").digits()
    theta = 4 * task.initial(0)
    ones = [task.clipped_sum(theta, torch.tensor([i])) for i in range(20)]
    torch.testing.assert_close(sum(ones), task.clipped_sum(theta, torch.arange(20)))
    assert 0.999 < max(float(one.norm()) for one in ones) < 1 + 1e-5
    # Not clipped, the gradient is that of a loss which falls along it.
    small = 0.1 * task.initial(1)
    before = task.accuracy(small, torch.arange(1500))
    for _ in range(30):
        small = small - 0.05 * task.clipped_sum(small, torch.arange(200)) / 20
    assert task.accuracy(small, torch.arange(1500)) > before + 0.2


def test_the_optimizers_of_the_study_are_those_of_torch(example: Any) -> None:
    runs = example("study_runs")
    gradients = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))
    table, rate = runs.Optimizer.numbers(BANDED, 8.0, 10.0), 0.03
    corrected = example("adaptive").CorrectedAdam if importlib.util.find_spec("opacus") else None
    twins = {"momentum": lambda p: torch.optim.SGD(p, lr=rate, momentum=0.9)}
    twins |= {
        "adamw": lambda p: torch.optim.AdamW(p, lr=rate),
        "corrected": corrected and (lambda p: corrected(p, rate)),
    }
    for name, make in twins.items():
        if make is None:
            continue
        theta, twin = torch.ones(5), torch.ones(5, requires_grad=True)
        slow, fast = make([twin]), runs.Optimizer(name, theta, 20)
        slow.levels = 0.8 * np.linalg.norm(runs.noise_rows(BANDED), axis=1)
        fast.begin(table, rate)
        for t, gradient in enumerate(gradients):
            twin.grad = gradient.clone()
            slow.step()
            fast.update(theta, gradient, torch.tensor([t]))
        torch.testing.assert_close(theta, twin.detach(), rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match="optimizer must be one of momentum, adamw, corrected, got adam"):
        runs.Optimizer("adam", theta, 20)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels run on a GPU")
def test_the_kernels_of_the_study_sum_clipped_gradients(example: Any) -> None:
    """Their slow twin is `cifar10_grid.clipped_sum` in single precision; on CIFAR-10 they differ by 1.3 %."""
    pytest.importorskip("triton")
    kernels, grid, data = (example(f"cifar10_{name}") for name in ("kernels", "grid", "data"))
    x, labels = torch.from_numpy(images(250, 0)).cuda(), torch.arange(250).cuda() % 10
    mean, std = (torch.tensor(v).view(1, 3, 1, 1).cuda() for v in (data.MEAN, data.STD))
    offsets = [0, *np.cumsum([int(np.prod(shape)) for shape in grid.shapes()]).tolist()]
    step = kernels.Step(kernels.patches(x, mean, std), labels, 256, 1, grid.CLIP, offsets)
    theta = 3 * grid.initial(0).cuda()
    step.theta.copy_(theta)
    step.theta16.copy_(theta)
    step.rate.fill_(-1.0)
    step.index[0, :250], step.counts[0] = torch.arange(250), 250
    step(256)
    expected = grid.clipped_sum(theta, (x.float() / 255 - mean) / std, labels, torch.ones(250).cuda())
    assert float((step.factor[:250] < 1).float().mean()) > 0
    assert float((step.theta - theta - expected).norm() / expected.norm()) < 0.05


def test_the_study_tunes_trains_and_goes_on(archive: Path, tmp_path: Path, example: Any, run: Any) -> None:
    mechanisms, output = tmp_path / "mechanisms.json", tmp_path / "runs.csv"
    mechanisms.write_text(json.dumps([{**BANDED, "epochs": 2, "batches": 1}]))
    words = ["train", "--task", "cifar10", "--data", str(archive), "--mechanisms", str(mechanisms)]
    words += ["--cells", "s:1", "s/adamw:1:m"]
    words += ["--output", str(output), "--seeds", "1", "--records", "20"]
    run("study", *words)
    first = output.read_text()
    assert first.count("held-out") >= 12  # two optimizers, three rates, two seeds
    assert (first.count("test"), first.count("s/adamw,m,1.0,test")) == (2, 1)
    run("study", *words)
    assert output.read_text() == first


def test_the_study_climbs_to_the_best_rate(example: Any) -> None:
    study = example("study")
    scores: dict[tuple[str, float], dict[int, float]] = {}
    while rates := study.to_try(scores, study.RATES, 0.11):
        for rate in rates:
            scores["held-out", rate] = dict.fromkeys(study.TUNING_SEEDS, -abs(np.log(rate / 0.8)))
    assert study.tuned(scores) == 0.84
    assert ("held-out", 1.2) in scores
    assert ("held-out", 1.8) not in scores
    scores["held-out", 1.2] = dict.fromkeys(range(4), -9.0)  # more seeds say more
    assert study.tuned(scores) == 1.2


def test_the_page_shows_the_committed_study(example: Any) -> None:
    study, report = example("study"), example("study_report")
    mechanisms, runs = study.read_mechanisms(study.MECHANISMS), study.read_runs(study.RUNS)
    page = (ROOT / "docs" / "training.md").read_text()
    for name, block in report.blocks(mechanisms, runs).items():
        assert f"<!-- {name} -->\n{block}\n<!-- end -->" in page
    for found in report.everything(mechanisms, runs)["main"].values():
        rates = [r.rate for r in found]
        assert study.RATES[0] < min(rates) <= max(rates) < study.RATES[-1]
        assert len(found[0].scores) == 20
    origins = {m["sigma_from"] for m in mechanisms.values() if m["setting"] == "main"}
    assert origins == {"proved: dpmf", "proved: dpmf best", "computed: dp_accounting"}


def test_the_noise_of_the_results_still_meets_its_target(example: Any) -> None:
    """Accountants get better: the σ that was trained with is then more than needed, never less."""
    single, sigma = example("cifar10"), example("cifar10_grid").read_sigma(SIGMA)
    for strategy, name in (("dpsgd", "best"), ("dpsgd", "renyi"), ("bsr4", "renyi")):
        found = dpmf.calibrate(
            single.mechanism(strategy), target_epsilon=8.0, target_delta=1e-5, accountant=single.ACCOUNTANTS[name]
        )
        assert found.noise_multiplier <= sigma[strategy, name, 8.0] * (1 + 2e-4)
