"""The audit: train, record what was clipped, summed and added, and check that it is the mechanism accounted for.

The model is a vector, and record i pushes coordinate i as hard as it can, always the same way: the worst case that the
accountants assume. So the recorded sums show who took part when, and the other coordinates show nothing but noise.
Every check is also shown to fail on a training loop with the mistake it is there for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import dpmf
from dpmf.errors import TrainingError
from dpmf.training import PrivateTraining, make_private
from dpmf.training.noise import NoiseStream
from tests.decoders import decoder

torch = pytest.importorskip("torch")
pytest.importorskip("opacus")


RECORDS, WIDTH, CLIP, SIGMA = 40, 8_000, 0.3, 1.5
BINS = 5
ALLOCATION = dpmf.BallsInBins.from_iterations(17, BINS)
STRATEGIES = {
    "dpsgd": dpmf.strategies.dpsgd(),
    "bsr": dpmf.strategies.bsr(3),
    "bisr": dpmf.strategies.bisr(3),
    "normalised": dpmf.strategies.bsr(3).normalized(),
    "matrix": dpmf.strategies.matrix(np.tril(np.random.default_rng(0).uniform(0, 1, (17, 17))) + np.eye(17)),
}
BSR = STRATEGIES["bsr"]
MECHANISMS = {name: dpmf.Mechanism(strategy, ALLOCATION) for name, strategy in STRATEGIES.items()}
MECHANISMS |= {
    "reshuffled": dpmf.Mechanism(BSR, dpmf.reshuffled(3, BINS)),
    "reshuffled, not banded": dpmf.Mechanism(STRATEGIES["bisr"], dpmf.reshuffled(3, BINS, gap=3)),
    "every other epoch": dpmf.Mechanism(BSR, dpmf.BallsInBins(4, BINS, rethrow_every=2)),
    "cyclic": dpmf.Mechanism(dpmf.strategies.bsr(5), dpmf.reshuffled(3, 10, stride=5)),
    "poisson": dpmf.Mechanism(STRATEGIES["dpsgd"], dpmf.Poisson(3, BINS)),
    "cyclic poisson": dpmf.Mechanism(BSR, dpmf.cyclic_poisson(3, 10, BINS)),
}


def steps_of(mechanism: dpmf.Mechanism) -> int:
    """How many batches there are."""
    batching = mechanism.batching
    return min(batching.epochs * batching.batches_per_epoch, batching.iterations)


@dataclass
class Records(torch.utils.data.Dataset):
    size: int = RECORDS
    users: list[int] | None = None  # with them, record i pushes the coordinate of its user

    def __len__(self) -> int:
        return self.size if self.users is None else len(self.users)

    def __getitem__(self, index: int) -> Any:
        x = torch.zeros(WIDTH)
        # any length: clipping makes them all the same
        x[index if self.users is None else self.users[index]] = 3.0 + index
        return x


USERS = [user for user in range(RECORDS) for _ in range(1 + user % 3)]
USERS = [USERS[place] for place in np.random.default_rng(1).permutation(len(USERS))]


@dataclass
class Trace:
    """What a training run did, step by step, in units of the clipping norm."""

    gradients: list[np.ndarray] = field(default_factory=list)  # one row per record of the batch, clipped here
    sums: list[np.ndarray] = field(default_factory=list)
    releases: list[np.ndarray] = field(default_factory=list)


def begin(
    mechanism: dpmf.Mechanism, size: int = RECORDS, seed: int = 3, users: list[int] | None = None, **options: Any
) -> PrivateTraining:
    torch.set_num_threads(1)
    model = torch.nn.Linear(WIDTH, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    given = {"noise_multiplier": SIGMA, "max_grad_norm": CLIP, "seed": seed, "unit": users, **options}
    return make_private(model, optimizer, Records(size, users), mechanism, **given)


def train(run: PrivateTraining, steps: int, trace: Trace | None = None) -> Trace:
    """An ordinary loop. Only public attributes are looked at, and the model itself says what was released."""
    trace = trace or Trace()
    model, optimizer, loader = run
    (weight,) = model.parameters()
    expected = RECORDS / run.mechanism.batching.batches_per_epoch
    release = run.current.release

    def recorded() -> Any:
        summed = run.current.summed
        trace.sums.append(summed.totals[0].numpy() * summed.grid / CLIP)
        return release()

    run.current.release = recorded
    while steps:
        for x in loader:
            optimizer.zero_grad()
            (-model(x)).sum().div(max(len(x), 1)).backward()
            samples = weight.grad_sample.detach().double().numpy().reshape(len(x), WIDTH)
            if run.sampler.units is not None:  # the coordinate that a record pushes says whose it is
                owner = np.argmax(x.numpy(), axis=1)
                samples = np.array([samples[owner == user].mean(axis=0) for user in set(owner)]).reshape(-1, WIDTH)
            elif run.sampler.cut is not None:  # rows that only fill up the batch
                samples = samples[: len(run.sampler.batch(run.steps_made))]
            norms = np.linalg.norm(samples, axis=1, keepdims=True)
            trace.gradients.append(samples * np.minimum(1.0, CLIP / norms) / CLIP)
            before = weight.detach().double().numpy().ravel().copy()
            optimizer.step()
            moved = before - weight.detach().double().numpy().ravel()  # learning rate 1
            trace.releases.append(moved * expected / CLIP)
            steps -= 1
            if not steps:
                break
    run.current.release = release
    return trace


def findings(trace: Trace, mechanism: dpmf.Mechanism) -> list[str]:
    """What is not as it was accounted for."""
    wrong = []
    if len(trace.sums) != steps_of(mechanism):
        return [f"{len(trace.sums)} steps instead of {steps_of(mechanism)}"]
    sums, releases = np.stack(trace.sums), np.stack(trace.releases)
    for t, gradients in enumerate(trace.gradients):
        if not np.allclose(sums[t], gradients.sum(axis=0), atol=1e-4):
            wrong.append(f"the sum of step {t} is not that of the clipped gradients")
    taken = np.abs(sums[:, :RECORDS]) > 0.5
    poisson = isinstance(mechanism.batching, dpmf.Poisson)
    wrong += (_samples if poisson else _throws)(taken, mechanism)
    wrong += _sensitivity(sums[:, :RECORDS], mechanism)
    # Noise: what was added has the covariance of σC⁻¹Z, settled in gaps.
    inverse = decoder(mechanism)
    white = np.linalg.solve(np.linalg.cholesky(inverse @ inverse.T), releases - sums) / SIGMA
    covariance = white @ white.T / WIDTH
    if np.abs(np.triu(covariance, 1)).max() > 5.5 * WIDTH**-0.5:
        wrong.append("the noise is correlated in another way")
    if np.abs(np.diag(covariance) - 1).max() > 5.5 * (2 / WIDTH) ** 0.5:
        wrong.append(f"the noise has variance {np.diag(covariance).round(3)} times what was accounted for")
    # Of so many normals the largest is above this, except with a probability below 10⁻⁵. An output that the noise does
    # not reach without a record shows that the record is there.
    if (reach := np.abs(white).max()) < 3.9:
        wrong.append(f"the noise ends at {reach:.2f} deviations")
    return wrong


def _rows(mechanism: dpmf.Mechanism) -> np.ndarray:
    """The iteration of every step: iterations of gaps are none."""
    steps, batching = np.arange(steps_of(mechanism)), mechanism.batching
    if isinstance(batching, dpmf.Poisson) or batching.throws == 1:
        return steps
    return steps + steps // (batching.rethrow_every * batching.batches_per_epoch) * batching.gap


def _throws(taken: np.ndarray, mechanism: dpmf.Mechanism) -> list[str]:
    """Participation: in each throw, a record in the iterations i, i + b, ... of one bin i, and in all of them."""
    wrong, batching = [], mechanism.batching
    b, m, s = batching.batches_per_epoch, batching.rethrow_every or batching.epochs, batching.stride
    bins = np.full((batching.throws, RECORDS), -1)
    for throw in range(batching.throws):
        part = taken[throw * m * b : (throw + 1) * m * b]
        for record in range(RECORDS):
            took_part = np.flatnonzero(part[:, record])
            if not len(took_part) or list(took_part) != list(range(took_part[0] % b, len(part), b)):
                wrong.append(f"record {record} took part in iterations {took_part} of throw {throw}")
            else:
                bins[throw, record] = took_part[0]
        if set(range(b)) - set(bins[throw]) and 8 * b <= RECORDS:
            wrong.append("bins that nobody is in, of those that were expected to be used")
    if wrong:
        return wrong
    groups = bins % s
    if (groups != groups[0]).any() or np.ptp(np.bincount(groups[0], minlength=s)) > 1:
        wrong.append(f"records do not keep to bins that are {s} apart, in groups of equal size")
    # Bins are thrown anew: about s/b of the records hit the same bin again.
    same, tried, rate = (bins[1:] == bins[:-1]).sum(), bins[1:].size, s / b
    if abs(same - rate * tried) > 4.5 * (tried * rate * (1 - rate)) ** 0.5:
        wrong.append(f"{same} of {tried} times a record was thrown into the same bin again")
    return wrong


def _samples(taken: np.ndarray, mechanism: dpmf.Mechanism) -> list[str]:
    """Participation: in the iterations of one group, in each of them with probability q/b and independently."""
    batching, wrong = mechanism.batching, []
    b, q = batching.batches_per_epoch, batching.period
    groups = taken.reshape(-1, q, RECORDS).any(axis=0)
    if (groups.sum(axis=0) > 1).any():
        wrong.append(f"records do not keep to iterations that are {q} apart")
    rate, tried = q / b, len(taken) // q * RECORDS
    if abs(taken.sum() - rate * tried) > 4.5 * (tried * rate * (1 - rate)) ** 0.5:
        wrong.append(f"{taken.sum()} participations in {tried} samples at rate {rate}")
    # Coins instead of allocation: how often a record takes part exactly once in an epoch.
    epochs = taken.reshape(-1, b, RECORDS).sum(axis=1)
    once = b * (1 / q) * rate * (1 - rate) ** (b // q - 1)
    if abs((epochs == 1).sum() - once * epochs.size) > 4.5 * (epochs.size * once * (1 - once)) ** 0.5:
        wrong.append(f"a record took part exactly once in {(epochs == 1).sum()} of {epochs.size} epochs")
    return wrong


def _sensitivity(sums: np.ndarray, mechanism: dpmf.Mechanism) -> list[str]:
    """What a record does to C·x: in each throw it is as long as its mixture mean, and throws do not overlap."""
    batching, n = mechanism.batching, mechanism.batching.iterations
    contributions = mechanism.strategy.matrix(n)[:, _rows(mechanism)][:, :, None] * sums  # at [row, step, record]
    if isinstance(batching, dpmf.Poisson):
        length, most, between = batching.period, float(np.square(mechanism.strategy.matrix(n)[:, 0]).sum()), 0.0
    else:
        length = (batching.rethrow_every or batching.epochs) * batching.batches_per_epoch
        most, between = float(mechanism.throw.gram.max()), mechanism.product_between_throws
    starts = np.arange(0, len(sums), length)
    means = np.moveaxis(np.add.reduceat(contributions, starts, axis=1), 2, 0)  # at [record, row, throw]
    products = np.swapaxes(means, 1, 2) @ means
    squares = np.diagonal(products, axis1=1, axis2=2)
    wrong = []
    if squares.max() > most * (1 + 1e-4):
        wrong.append(f"a record has sensitivity {squares.max() ** 0.5:.4f}, more than {most**0.5:.4f}")
    if batching.fixed:
        expected = np.diagonal(mechanism.gram)[np.argmax(np.abs(sums) > 0.5, axis=0) % batching.batches_per_epoch]
        if not np.allclose(squares[:, 0], expected, rtol=1e-4):
            wrong.append("the sensitivity of a record is not that of its bin")
    overlap = np.abs(products - squares[:, :, None] * np.eye(len(starts))).max()
    if overlap > between * (1 + 1e-4) + 1e-6:
        wrong.append(f"different throws of a record have inner product {overlap:.4f}, more than {between:.4f}")
    return wrong


@pytest.mark.parametrize("name", MECHANISMS)
def test_training_is_the_mechanism(name: str) -> None:
    mechanism = MECHANISMS[name]
    assert findings(train(begin(mechanism), steps_of(mechanism)), mechanism) == []


@pytest.mark.parametrize("name", ["bsr", "reshuffled", "cyclic poisson"])
def test_a_resumed_training_is_the_mechanism(name: str, tmp_path: Any) -> None:
    mechanism, stop = MECHANISMS[name], 2 * BINS
    first = begin(mechanism)
    trace = train(first, stop)
    first.save(tmp_path / "c")
    second = begin(mechanism, seed=55)
    second.load(tmp_path / "c")
    assert findings(train(second, steps_of(mechanism) - stop, trace), mechanism) == []


@pytest.mark.parametrize("name", ["bsr", "every other epoch", "cyclic", "cyclic poisson"])
def test_without_a_record_the_rest_is_the_same(name: str) -> None:
    """The two neighbouring runs differ by one record's own contribution, in its own batches, and by nothing else."""
    mechanism = MECHANISMS[name]
    public = {"expected_batch_size": RECORDS / mechanism.batching.batches_per_epoch}
    with_it, without = begin(mechanism, **public), begin(mechanism, RECORDS - 1, **public)
    assert _difference(with_it, without, RECORDS - 1) < 2e-4
    if name == "bsr":  # the audit notices a divisor that depends on the data, be it on their number only
        assert _difference(begin(mechanism), begin(mechanism, RECORDS - 1), RECORDS - 1) > 0.02


def _difference(with_it: PrivateTraining, without: PrivateTraining, coordinate: int) -> float:
    """By how much what two runs release differs otherwise than by the contribution to a coordinate of their own."""
    steps = steps_of(with_it.mechanism)
    trace = train(with_it, steps)
    owner = with_it.data_loader.dataset.users or range(RECORDS)
    own = [-1.0 if coordinate in {owner[record] for record in with_it.sampler.batch(t)} else 0.0 for t in range(steps)]
    np.testing.assert_allclose(np.stack(trace.sums)[:, coordinate], own, atol=2e-4)
    difference = np.stack(trace.releases) - np.stack(train(without, steps).releases)
    difference[:, coordinate] -= own
    return float(np.abs(difference).max())


def test_users_are_the_unit() -> None:
    """A user's records push one coordinate: it takes part with all of them in one bin, and counts once."""
    mechanism = MECHANISMS["reshuffled"]
    run = begin(mechanism, users=USERS)
    assert findings(train(run, steps_of(mechanism)), mechanism) == []
    public = {"expected_batch_size": RECORDS / BINS}
    last = list(dict.fromkeys(USERS))[-1]  # who appears last, so that the others keep their bins
    others = [user for user in USERS if user != last]
    assert _difference(*(begin(mechanism, users=users, **public) for users in (USERS, others)), last) < 2e-4
    # Clipping records one by one, as if they were the units, is noticed; so is throwing them one by one.
    run = begin(mechanism, users=USERS)
    run.current._units = lambda samples, _: list(samples)
    noticed = findings(train(run, steps_of(mechanism)), mechanism)
    assert any("more than" in line for line in noticed), noticed
    run = begin(mechanism, users=USERS, unit=None)
    noticed = findings(train(run, steps_of(mechanism)), mechanism)
    assert any("took part" in line for line in noticed), noticed


def test_batches_of_one_size_are_the_mechanism() -> None:
    """Padding contributes nothing; and a batch that is cut is noticed."""
    mechanism = MECHANISMS["reshuffled"]
    assert findings(train(begin(mechanism, max_batch_size=20), steps_of(mechanism)), mechanism) == []
    noticed = findings(train(begin(mechanism, max_batch_size=8), steps_of(mechanism)), mechanism)
    assert any("took part" in line for line in noticed), noticed


def _fresh_noise(run: PrivateTraining) -> None:
    run.noise._kept = None
    run.noise._source = type(run.noise._source)(bytes(32))


def _more_bins(run: PrivateTraining) -> None:
    run.sampler._use(type(run.sampler._source)(bytes(32)))


MISTAKES: dict[str, tuple[str, Callable[[PrivateTraining], None], Callable[[PrivateTraining], None] | None]] = {
    "half the noise": ("variance", lambda run: _other_run(run, noise_multiplier=SIGMA / 2), None),
    "clipped twice as long": ("sum of step", lambda run: _other_run(run, clip_norm=2 * CLIP), None),
    "independent noise": ("correlated", lambda run: setattr(run.noise, "plan", IDENTITY), None),
    "fresh noise on resuming": ("correlated|variance", lambda run: None, _fresh_noise),
    "new bins every epoch": ("took part", lambda run: None, _more_bins),
    "divided by the actual batch size": ("correlated|variance", lambda run: _divide_by_actual(run), None),
    "normals of half precision": ("the noise ends at", lambda run: _cut_noise(run), None),
    "sums of half precision": ("sum of step", lambda run: _round_sums(run), None),
    "clip factors of half precision": ("sum of step", lambda run: _round_factors(run), None),
}
IDENTITY = NoiseStream(MECHANISMS["dpsgd"], []).plan


def _other_run(run: PrivateTraining, **changes: float) -> None:
    run.current.run = dataclasses.replace(run.run, **changes)


def _divide_by_actual(run: PrivateTraining) -> None:
    finish = run.current.finish

    def wrong(released: list[Any], follow: Callable[[], Any]) -> Any:
        size = max(len(run.sampler.batch(run.steps_made - 1)), 1)
        return finish([gradient * (RECORDS / BINS / size) for gradient in released], follow)

    run.current.finish = wrong


def _cut_noise(run: PrivateTraining) -> None:
    draw = run.noise._backend.draw
    run.noise._backend.draw = lambda *place: draw(*place).clip(-3.18, 3.18)  # as far as those of float16 go


def _round_sums(run: PrivateTraining) -> None:
    add = run.current.add

    def rounded(samples: list[Any]) -> None:
        add(samples)
        summed = run.current.summed
        summed.totals[0].copy_((summed.totals[0] * summed.grid).bfloat16() / summed.grid)

    run.current.add = rounded


def _round_factors(run: PrivateTraining) -> None:
    """As under autocast."""
    add = run.current.add

    def rounded(samples: list[Any]) -> None:
        flat = samples[0].flatten(1).clone()
        add(samples)
        factors = (CLIP / flat.norm(dim=1)).bfloat16().float().clamp(max=1)
        run.current.summed.totals[0].copy_((factors[:, None] * flat).sum(dim=0) / run.current.summed.grid)

    run.current.add = rounded


@pytest.mark.parametrize("name", MISTAKES)
def test_the_audit_notices(name: str) -> None:
    found, before, between = MISTAKES[name]
    mechanism = MECHANISMS["bsr"]
    run = begin(mechanism)
    before(run)
    trace = train(run, 10)
    if between is not None:
        between(run)
    trace = train(run, 7, trace)
    noticed = findings(trace, mechanism)
    assert any(part in line for line in noticed for part in found.split("|")), noticed


# What was accounted for, what is trained with instead, and what the audit says.
OTHERS: dict[str, tuple[str, dpmf.Mechanism, str]] = {
    "bins not thrown anew": (
        "reshuffled",
        dpmf.Mechanism(BSR, dpmf.BallsInBins(3, BINS)),
        "correlated in another way|thrown into the same bin again",
    ),
    "no gap": ("reshuffled", dpmf.Mechanism(BSR, dpmf.reshuffled(3, BINS, gap=0)), "correlated in another way"),
    "no stride": (
        "cyclic",
        dpmf.Mechanism(dpmf.strategies.bsr(5), dpmf.reshuffled(3, 10)),
        "bins that are 5 apart",
    ),
    "Poisson samples instead of bins": (
        "reshuffled without noise in common",
        dpmf.Mechanism(STRATEGIES["dpsgd"], dpmf.Poisson(3, BINS)),
        "took part in iterations",
    ),
    "bins instead of Poisson samples": (
        "poisson",
        dpmf.Mechanism(STRATEGIES["dpsgd"], dpmf.reshuffled(3, BINS)),
        "exactly once in 120 of 120 epochs",
    ),
    "cyclic bins instead of cyclic Poisson samples": (
        "cyclic poisson",
        dpmf.Mechanism(BSR, dpmf.reshuffled(3, 10, stride=BINS, gap=0)),
        "exactly once in 120 of 120 epochs",
    ),
    "Poisson samples without a period": (
        "cyclic poisson",
        dpmf.Mechanism(STRATEGIES["dpsgd"], dpmf.Poisson(3, 10)),
        "iterations that are 5 apart|different throws of a record",
    ),
}
MECHANISMS["reshuffled without noise in common"] = dpmf.Mechanism(STRATEGIES["dpsgd"], dpmf.reshuffled(3, BINS))


@pytest.mark.parametrize("name", OTHERS)
def test_the_audit_notices_another_batching(name: str) -> None:
    accounted, other, found = OTHERS[name]
    mechanism = MECHANISMS[accounted]
    noticed = findings(train(begin(other), steps_of(mechanism)), mechanism)
    assert all(any(part in line for line in noticed) for part in found.split("|")), noticed


# What no single run shows: whether draws of the model can be known, and what is said of a run that is stopped.


class Masked(torch.nn.Module):
    """A model with dropout, which keeps its masks."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.last = torch.nn.Dropout(0.5), torch.nn.Linear(WIDTH, 1)
        self.masks: list[Any] = []

    def forward(self, x: Any) -> Any:
        mask = self.drop(torch.ones_like(x))
        self.masks.append(mask.detach())
        return self.last(x * mask)


def masks_with_a_known_seed(change: Callable[[PrivateTraining], None] = lambda run: None) -> list[str]:
    """Two runs with secret keys of their own, by a user who sets torch's seed: nobody may know the masks of either."""
    found = []
    for _ in (0, 1):
        model = Masked()
        run = make_private(
            model, torch.optim.SGD(model.parameters(), lr=1.0), Records(), MECHANISMS["bsr"],
            noise_multiplier=SIGMA, max_grad_norm=CLIP, expected_batch_size=1,
        )  # fmt: skip
        change(run)
        torch.manual_seed(0)
        for x in run.data_loader:
            run.optimizer.zero_grad()
            run.model(x).mean().backward()
            run.optimizer.step()
        found.append(torch.cat(model.masks)[:30])
    return ["masks are known to who knows torch's seed"] if torch.equal(*found) else []


def test_masks_are_secret_and_the_audit_notices_where_they_are_not() -> None:
    assert masks_with_a_known_seed() == []
    assert masks_with_a_known_seed(lambda run: run.model.__dict__.pop("forward"))


def spent(run: PrivateTraining) -> list[str]:
    """Whether a run that is stopped early, for whatever reason, says what its guarantee is."""
    train(run, 3)
    whole = dpmf.epsilon(MECHANISMS["bsr"], noise_multiplier=SIGMA, delta=1e-5, accountant="renyi").epsilon
    said = run.get_epsilon(1e-5)
    return [f"ε = {said:.3f} is said, {whole:.3f} holds for a rule to stop"] if said < whole else []


def test_what_is_said_of_a_run_that_is_stopped() -> None:
    assert spent(begin(MECHANISMS["bsr"], accountant="renyi")) == []
    wrong = begin(MECHANISMS["bsr"], accountant="renyi")
    part = dpmf.Mechanism(BSR, dpmf.BallsInBins(1, BINS))  # that of the steps made
    wrong.guarantee.run = dataclasses.replace(wrong.run, mechanism=part)
    assert "holds for a rule to stop" in spent(wrong)[0]


@dataclass
class Spoilt(Records):
    """The last record is not a number."""

    def __getitem__(self, index: int) -> Any:
        x = super().__getitem__(index)
        return x * np.nan if index == self.size - 1 else x


def test_a_record_that_is_not_a_number_changes_nothing_and_the_audit_notices_where_it_does() -> None:
    mechanism, last = MECHANISMS["bsr"], RECORDS - 1

    def begun(**options: Any) -> PrivateTraining:
        model = torch.nn.Linear(WIDTH, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        given = {"noise_multiplier": SIGMA, "max_grad_norm": CLIP, "seed": 3, **options}
        return make_private(model, optimizer, Spoilt(), mechanism, **given)

    run = begun()
    steps = steps_of(mechanism)
    sums = np.stack(train(run, steps).sums)
    assert np.isfinite(sums).all()
    assert not sums[:, last].any()  # its place is empty
    bins = run.sampler.bins
    assert all((np.abs(sums[t, :last]) > 0.5).sum() == (bins[:last] == t % BINS).sum() for t in range(steps))
    with pytest.raises(TrainingError, match="is not finite"):
        train(begun(on_nonfinite="stop"), steps)
