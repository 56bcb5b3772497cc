"""Sharded noise: any cut has the bits of the whole, in one process and in several; checkpoints of other cuts."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import dpmf  # noqa: E402
from dpmf.errors import TrainingError  # noqa: E402
from dpmf.training import NoiseStream, _backends, checkpoint, sharding  # noqa: E402
from dpmf.training.sharding import Shard, even_shares  # noqa: E402

MECHANISM = dpmf.Mechanism(dpmf.strategies.bsr(4), dpmf.BallsInBins(2, 6))
SHAPES = [(7, 5), (7,), (3, 4, 6), (), (1000,)]


def stream(shards: list[Shard] | None = None, **options: Any) -> NoiseStream:
    return NoiseStream(MECHANISM, SHAPES, shards=shards, **{"seed": 3, **options})


def whole_rows(steps: int) -> list[list[np.ndarray]]:
    noise = stream()
    return [noise.next() for _ in range(steps)]


def cut(shape: tuple[int, ...], dimension: int, rank: int, world: int) -> Shard:
    """A box along one dimension; a scalar is not cut."""
    if not shape:
        return Shard.all_of(shape)
    d = dimension % len(shape)
    low, high = shape[d] * rank // world, shape[d] * (rank + 1) // world
    offset, size = [0] * len(shape), list(shape)
    offset[d], size[d] = low, high - low
    return Shard(shape, tuple(offset), tuple(size))


@pytest.mark.parametrize("dimension", [0, 1, 2])
@pytest.mark.parametrize("chunk", [5, 1 << 15])
def test_every_box_has_the_bits_of_the_whole(dimension: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_backends, "CHUNK", chunk)
    whole = whole_rows(3)
    for rank in range(3):
        shards = [cut(shape, dimension, rank, 3) for shape in SHAPES]
        noise = stream(shards)
        for row in whole:
            for array, shard, mine in zip(row, shards, noise.next(), strict=True):
                box = tuple(slice(o, o + n) for o, n in zip(shard.offset, shard.shape, strict=True))
                assert np.array_equal(mine, array[box])


def test_other_devices_are_handed_what_the_cpu_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch draws on a device has tails that end somewhere. Here copies on the CPU stand for those on a device."""
    copies = _backends.CpuBackend("float32", lambda x: torch.tensor(x))
    whole, target = whole_rows(6), [torch.zeros(int(np.prod(shape))) for shape in SHAPES]
    monkeypatch.setattr(_backends, "make", lambda *_: copies)
    noise = stream()
    for row in whole[:3]:
        for array, mine in zip(row, noise.next(), strict=True):
            assert isinstance(mine, torch.Tensor)
            assert np.array_equal(mine.numpy(), array)
    noise.add_to(target, 2.0)
    for array, mine in zip(whole[3], target, strict=True):
        np.testing.assert_allclose(mine.reshape(array.shape).numpy(), 2 * array, rtol=1e-6)
    state = noise.state_dict()
    monkeypatch.undo()
    again = stream(seed=99)
    again.load_state_dict(state)  # the same generator, so that a run may change its device
    assert all(np.array_equal(a, b) for a, b in zip(again.next(), whole[4], strict=True))


@pytest.mark.parametrize("world", [1, 2, 3, 7, 64])
def test_even_shares_hold_everything_once(world: int) -> None:
    shares = [even_shares(SHAPES, rank, world) for rank in range(world)]
    total = sum(int(np.prod(shape)) for shape in SHAPES)
    sizes = [sum(shard.size for shard in share) for share in shares]
    assert sum(sizes) == total
    assert max(sizes) <= total // world + 1
    for array, shape in enumerate(SHAPES):
        seen = np.concatenate([
            np.arange(start, start + count)
            for share in shares
            for start, count in zip(*share[array].runs(0, share[array].size), strict=True)
        ])  # fmt: skip
        assert np.array_equal(seen, np.arange(int(np.prod(shape))))


def test_states_of_any_cut_are_continued_by_any_other() -> None:
    whole = whole_rows(6)
    rows: list[NoiseStream] = [stream([cut(shape, 1, rank, 4) for shape in SHAPES]) for rank in range(4)]
    for noise in rows:
        for _ in range(4):
            noise.next()
    states = [noise.state_dict() for noise in rows]
    for world in (1, 2, 5):
        for rank in range(world):
            noise = stream(even_shares(SHAPES, rank, world), seed=99)
            noise.prepared(states)()
            for row in whole[4:]:
                for array, shard, mine in zip(row, noise.shards, noise.next(), strict=True):
                    first = shard.offset[0]
                    assert np.array_equal(mine, array.reshape(-1)[first : first + shard.size])
    with pytest.raises(ValueError, match="of other shards or of too few ranks"):
        stream().prepared(states[:3])
    rows[0].next()
    with pytest.raises(ValueError, match="one run at one step on every rank"):
        stream().prepared([*states[1:], rows[0].state_dict()])


@pytest.mark.parametrize(
    "shards",
    [[], [Shard((7, 5), (1, 0), (7, 5))] * 5, [Shard.all_of((3,))] * 5, [Shard((35,), (0, 0), (35,))] * 5],
)
def test_shards_of_other_arrays_are_refused(shards: list[Shard]) -> None:
    with pytest.raises(ValueError, match="shards must be a part of every array"):
        stream(shards)


def test_without_a_process_group(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="needs a process group"):
        sharding.save(tmp_path / "c", stream())


JAX = """
import sys, jax, jax.numpy as jnp, numpy as np, optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import dpmf
from dpmf.training.jax import make_private

MECHANISM = dpmf.Mechanism(dpmf.strategies.bsr(4), dpmf.BallsInBins(2, 4))
DATA = np.random.default_rng(0).normal(size=(40, 64, 8)).astype(np.float32)
assert len(jax.devices()) == 4

def loss(weights, record):
    return jnp.sum(weights * record) / 50  # not clipped: norms of parts may differ in their last bits

class Run:
    def __init__(self, devices, rows):
        # Weights, and all that belongs to them, are spread, or the rows of every batch are.
        mesh = Mesh(np.array(jax.devices()[:devices]), ("d",))
        spread, everywhere = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("d",), ()))
        self.private = private = make_private(
            MECHANISM, records=40, clip_norm=1.0, noise_multiplier=1.0, max_batch_size=16, seed=3
        )
        gradient, self.optimizer = private.gradient(loss), optax.chain(private.noise, optax.sgd(0.5))
        self.weights = jax.device_put(jnp.zeros((64, 8)), everywhere if rows else spread)
        self.state = self.optimizer.init(self.weights)
        self.devices, self.released = devices, []

        @jax.jit
        def step(weights, state):
            batch = private.batch(state)
            if rows:
                parted = jax.lax.with_sharding_constraint((batch.indices, batch.real), spread)
                batch = batch._replace(indices=parted[0], real=parted[1])
            sums = gradient(weights, DATA, batch)
            updates, state = self.optimizer.update(sums, state, weights)
            return optax.apply_updates(weights, updates), state

        self.step = step

    def train(self, last):
        while int(self.private.state(self.state).step) < last:
            self.weights, self.state = self.step(self.weights, self.state)
            self.released.append(np.asarray(self.weights))
        return self

    def kept_in_parts(self):
        kept = [leaf for leaf in jax.tree.leaves(self.state) if np.ndim(leaf) == 3]
        assert kept
        largest = max(part.data.nbytes for leaf in kept for part in leaf.addressable_shards)
        return largest * self.devices == sum(leaf.nbytes for leaf in kept)

alone = Run(1, False).train(8).released
first = Run(4, False).train(5)
assert first.kept_in_parts()
first.private.save(sys.argv[1], (first.weights, first.state))
second = Run(2, False)
like = second.weights, second.state
second.weights, second.state = second.private.load(sys.argv[1], like)
assert second.weights.sharding == like[0].sharding
assert second.kept_in_parts()
spread = first.released + second.train(8).released
assert len(alone) == len(spread) == 8 and all(map(np.array_equal, alone, spread))
assert all(map(np.array_equal, alone, Run(4, True).train(8).released))
"""


def test_jax_spreads_sums_and_noise_over_devices(tmp_path: Path) -> None:
    """Four devices keep a quarter each, release the bits of one, and two go on from what they saved."""
    pytest.importorskip("optax")
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", JAX, str(tmp_path / "checkpoint")],
        capture_output=True, text=True, timeout=300, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


# Several processes.


def _model() -> Any:
    return torch.nn.Sequential(torch.nn.Linear(10, 33), torch.nn.Linear(33, 7), torch.nn.Linear(7, 3, bias=False))


def _sharded_model(seed: int = 3) -> tuple[list[Any], NoiseStream]:
    """The parameters of a model in FSDP2, with gradients of zeros, and the noise of this rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = _model()
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    parameters = list(model.parameters())
    model(torch.zeros(2, 10)).sum().mul(0.0).backward()
    shapes = [tuple(p.shape) for p in parameters]
    shards = sharding.shards_of(p.grad for p in parameters)
    return parameters, NoiseStream(MECHANISM, shapes, shards=shards, seed=seed, backend="torch")


def _steps(parameters: list[Any], noise: NoiseStream, last: int) -> None:
    while noise.step < last:
        sharding.add_noise([p.grad for p in parameters], noise, 1.0)


def _four(rank: int, world: int, directory: Path) -> None:
    parameters, noise = _sharded_model()
    _steps(parameters, noise, 5)
    sharding.save(directory / "checkpoint", noise)
    _steps(parameters, noise, 6)
    sharding.save(directory / "checkpoint", noise, {"note": 5})
    share = sum(p.numel() for p in parameters) / world
    kept = sum(rows.nbytes for rows in noise._past)
    # Parameters that cannot be cut evenly make the share of the first ranks larger, here by up to a row of each.
    rows = sum(p.numel() // p.shape[0] for p in parameters)
    assert kept == noise.state_bytes <= 1.05 * 3 * 4 * (share + rows)
    flat = NoiseStream(MECHANISM, [tuple(p.shape) for p in parameters], seed=3,
                       shards=even_shares([tuple(p.shape) for p in parameters], rank, world))  # fmt: skip
    flat.next()
    assert sum(rows.nbytes for rows in flat._past) <= 1.05 * 3 * 4 * share
    sharding.check_ranks(flat)

    # One rank begun for another number of ranks, or with another seed: all refuse, before anything is added.
    wrong = even_shares(flat.shapes, rank, 5)
    with pytest.raises(TrainingError, match="on the 4 ranks must be all of it, each element once"):
        sharding.check_ranks(NoiseStream(MECHANISM, flat.shapes, seed=3, shards=wrong))
    with pytest.raises(TrainingError, match="all ranks must have the same mechanism, parameters, seed and step"):
        sharding.check_ranks(NoiseStream(MECHANISM, flat.shapes, seed=rank // 3, shards=flat.shards))
    # What one rank cannot read, nobody loads.
    where = directory / ("checkpoint" if rank else "nowhere")
    with pytest.raises((FileNotFoundError, TrainingError), match=r"could not load|nowhere"):
        sharding.load(where, noise)


def _any_number(rank: int, world: int, directory: Path) -> None:
    """Load what four ranks wrote, go on, and compare with the whole."""
    parameters, noise = _sharded_model(seed=77)
    for parameter, shard in zip(parameters, noise.shards, strict=True):
        assert tuple(parameter.to_local().shape) == shard.shape
    assert sharding.load(directory / "checkpoint", noise) == {"note": 5}
    assert noise.step == 6
    _steps(parameters, noise, 9)
    alone = NoiseStream(MECHANISM, noise.shapes, seed=3, backend="torch")
    rows = [alone.next() for _ in range(9)]
    for k, parameter in enumerate(parameters):
        assert torch.equal(parameter.grad.full_tensor(), rows[6][k] + rows[7][k] + rows[8][k])


def _loses_a_rank(rank: int, world: int, directory: Path) -> None:
    parameters, noise = _sharded_model()
    _steps(parameters, noise, 1)
    if rank == 1:
        os._exit(1)
    with pytest.raises(TrainingError, match=r"another rank does not answer.*begin all ranks again"):
        _steps(parameters, noise, 2)
    assert noise.step == 1


def _process(number: int, directory: Path) -> None:
    """Four processes, of which two make a smaller group afterwards, and another one a group of its own."""
    torch.set_num_threads(1)
    groups = [(_four, number, 4)]
    if number < 2:
        groups += [(_any_number, number, 2), (_loses_a_rank, number, 2)]
    if number == 3:
        groups += [(_any_number, 0, 1)]
    dist = torch.distributed
    for work, rank, world in groups:
        store = dist.FileStore(str(directory / f"store-{work.__name__}-{world}"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=120))
        work(rank, world, directory)
        (directory / f"done-{work.__name__}-{rank}-of-{world}").touch()
        dist.destroy_process_group()


def test_one_two_and_four_processes(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.fsdp", "pytest", "dpmf.training.sharding"])
    processes = [context.Process(target=_process, args=(number, tmp_path)) for number in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
        if process.is_alive():
            process.kill()
    done = {file.name.removeprefix("done-_") for file in tmp_path.glob("done-*")}
    four, two = {f"four-{rank}-of-4" for rank in range(4)}, {f"any_number-{rank}-of-2" for rank in range(2)}
    assert done == four | two | {"any_number-0-of-1", "loses_a_rank-0-of-2"}
    assert len(list(tmp_path.glob("checkpoint.*.part"))) == 4

    # The same files, read by a stream in this process; and what is missing or of another step is refused.
    parts = sorted(tmp_path.glob("checkpoint.*.part"))
    state = checkpoint.load(tmp_path / "checkpoint")["noise"]
    shapes = [tuple(p.shape) for p in _model().parameters()]
    noise = NoiseStream(MECHANISM, shapes, seed=1)
    noise.prepared(sharding.states(tmp_path / "checkpoint", state))()
    other = checkpoint.load(parts[0])
    checkpoint.save(parts[0], {**other, "step": 5})
    with pytest.raises(ValueError, match="parts of one run at one step"):
        list(sharding.states(tmp_path / "checkpoint", state))
    parts[0].unlink()
    with pytest.raises(ValueError, match=r"all of its 4 parts beside it, .* is missing"):
        list(sharding.states(tmp_path / "checkpoint", state))
