"""The kernel for GPUs, on one or in Triton's interpreter (TRITON_INTERPRET=1): the noise of a CPU, and its states."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("there is no GPU, and TRITON_INTERPRET is not 1", allow_module_level=True)

import dpmf  # noqa: E402
from dpmf.kernels.noise import SINGLE_TILE  # noqa: E402
from dpmf.strategies.buffered import GivenBuffers  # noqa: E402
from dpmf.training import NoiseStream, _backends, sharding  # noqa: E402
from dpmf.training._gpu import TritonBackend  # noqa: E402
from dpmf.training._shards import Shard  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(2, SINGLE_TILE - 9), (), (0, 2)]
STEPS = 6
FULL = np.tril(np.random.default_rng(1).uniform(0.1, 1, (STEPS, STEPS))) + np.eye(STEPS)
BANDED = FULL * (np.subtract.outer(np.arange(STEPS), np.arange(STEPS)) < 4)
STRATEGIES = {
    "dpsgd": dpmf.strategies.dpsgd(),
    "bsr2": dpmf.strategies.bsr(2),
    "bsr4": dpmf.strategies.bsr(4).normalized(),
    "bsr7": dpmf.strategies.bsr(7),
    "bisr4": dpmf.strategies.bisr(4),
    "buffers": GivenBuffers((0.9, 0.4), (0.2, 0.3)),
    "banded matrix": dpmf.strategies.matrix(BANDED),
    "full matrix": dpmf.strategies.matrix(FULL),
}


@pytest.fixture(autouse=True)
def _in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        made = _backends.make

        def make(name: str, dtype: str, device: Any) -> Any:
            return TritonBackend("cpu") if device == "cpu" and dtype == "float32" else made(name, dtype, device)

        monkeypatch.setattr(_backends, "make", make)


def stream(strategy: Any, device: str | None = DEVICE, **options: Any) -> NoiseStream:
    mechanism = dpmf.Mechanism(strategy, options.pop("batching", dpmf.BallsInBins(2, 3)))
    return NoiseStream(mechanism, SHAPES, seed=3, backend="torch", device=device, max_copies=8, **options)


def steps(noise: NoiseStream, count: int) -> list[Any]:
    return [np.concatenate([row.cpu().numpy().reshape(-1) for row in noise.next()]) for _ in range(count)]


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("source", ["fast", "secure"])
def test_the_noise_is_that_of_a_cpu(name: str, source: str) -> None:
    noise = stream(STRATEGIES[name], source=source)
    assert isinstance(noise._backend, TritonBackend)
    slow = steps(stream(STRATEGIES[name], device=None, source=source), STEPS)
    np.testing.assert_allclose(steps(noise, STEPS), slow, rtol=0, atol=2e-5)


def test_rows_of_a_gap_are_added_up() -> None:
    batching = dpmf.reshuffled(2, 3, gap=2)
    slow = steps(stream(dpmf.strategies.bsr(4), device=None, batching=batching), STEPS)
    np.testing.assert_allclose(steps(stream(dpmf.strategies.bsr(4), batching=batching), STEPS), slow, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ["bsr4", "bsr7", "bisr4", "buffers"])
def test_a_resumed_stream_gives_the_same_bits(name: str) -> None:
    whole = steps(stream(STRATEGIES[name]), STEPS)
    for stop in (1, 4):
        first = stream(STRATEGIES[name])
        before = steps(first, stop)
        second = stream(STRATEGIES[name])
        second.load_state_dict(first.state_dict())
        assert np.array_equal(before + steps(second, STEPS - stop), whole)
    with pytest.raises(ValueError, match="generator that made it"):
        stream(STRATEGIES[name], device=None).load_state_dict(first.state_dict())


@pytest.mark.parametrize("ranks", [2, 3])
def test_any_number_of_ranks_gives_the_same_bits(ranks: int) -> None:
    whole = steps(stream(STRATEGIES["bsr7"]), 6)
    parts = [steps(stream(STRATEGIES["bsr7"], shards=sharding.even_shares(SHAPES, r, ranks)), 6) for r in range(ranks)]
    sizes = [[shard.size for shard in sharding.even_shares(SHAPES, r, ranks)] for r in range(ranks)]
    for t in range(6):
        cut = [np.split(part[t], np.cumsum(size)[:-1]) for part, size in zip(parts, sizes, strict=True)]
        assert np.array_equal(np.concatenate([rank[a] for a in range(len(SHAPES)) for rank in cut]), whole[t])


def test_shards_of_many_runs() -> None:
    noise = stream(STRATEGIES["bsr4"])
    row = noise.next()[0].cpu().numpy()
    cut = [Shard(SHAPES[0], (0, 5), (2, 900)), *(Shard.all_of(s) for s in SHAPES[1:])]
    assert np.array_equal(stream(STRATEGIES["bsr4"], shards=cut).next()[0].cpu().numpy(), row[:, 5:905])


def test_noise_is_added_in_place_whatever_the_precision() -> None:
    expected = stream(STRATEGIES["bsr4"]).next()
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        targets = [torch.ones(math.prod(s), dtype=dtype, device=DEVICE) for s in SHAPES]
        stream(STRATEGIES["bsr4"]).add_to(targets, 0.5)
        for target, row in zip(targets, expected, strict=True):
            error = (target.double() - 1 - 0.5 * row.reshape(-1).double()).abs().max().item() if len(target) else 0.0
            assert error <= 4 * torch.finfo(dtype).eps
