"""A plan on paper: the noise of a model with 10⁹ parameters, BSR(p=16), on 64 ranks, without taking its memory.

    python -m benchmarks plan

The model is made on torch's meta device and sharded by FSDP2 over a process group that only pretends to have 64 ranks,
so that shapes, shards and streams are the real ones. Bytes are what a rank keeps between steps. Seconds on a CPU are
measured: the share of the last rank with DDP is then made for real. Seconds on a GPU are the bytes that a step moves,
divided by the bandwidth given below: an estimate, not a measurement.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from dpmf.batching import BallsInBins
from dpmf.mechanism import Mechanism
from dpmf.strategies.closed_form import bsr

RANKS = 64
BANDWIDTH = 16
LAYERS, WIDTH, VOCABULARY = 20, 2048, 3072
GPU_BYTES_PER_SECOND = 3e12  # of a current accelerator's memory, as its maker states it, and rounded down


def _model() -> Any:
    """A transformer's matrices: attention and a feed-forward layer per block, an embedding and the last layer."""
    import torch

    def block() -> Any:
        sizes = ((WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH))
        return torch.nn.Sequential(*(torch.nn.Linear(a, b) for a, b in sizes), torch.nn.LayerNorm(WIDTH))

    with torch.device("meta"):
        blocks = [block() for _ in range(LAYERS)]
        return torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, WIDTH), *blocks, torch.nn.Linear(WIDTH, VOCABULARY))


def main() -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from dpmf.training import NoiseStream
    from dpmf.training.sharding import even_shares, shards_of

    mechanism = Mechanism(bsr(BANDWIDTH), BallsInBins(10, 100))
    kept: dict[str, list[int]] = {"FSDP2": [], "DDP": []}
    for rank in range(RANKS):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
        model = _model()
        mesh = init_device_mesh("cpu", (RANKS,))
        for part in model:
            fully_shard(part, mesh=mesh)
        parameters = list(fully_shard(model, mesh=mesh).parameters())
        shapes = [tuple(p.shape) for p in parameters]
        for name, shards in (("FSDP2", shards_of(parameters)), ("DDP", even_shares(shapes, rank, RANKS))):
            kept[name].append(NoiseStream(mechanism, shapes, shards=shards, seed=1).state_bytes)
        dist.destroy_process_group()
    total = sum(int(np.prod(shape)) for shape in shapes)
    share = 4 * total * (BANDWIDTH - 1) / RANKS
    print(f"{total:,} parameters in {len(shapes)} arrays, BSR(p={BANDWIDTH}), {RANKS} ranks, noise in float32")
    print(f"one process alone would keep {share * RANKS / 2**30:.1f} GiB")
    for name, bytes_kept in kept.items():
        largest = max(bytes_kept)
        print(f"{name:5}: at most {largest / 2**20:.0f} MiB per rank, {largest / share:.3f} × its share")

    noise = NoiseStream(mechanism, shapes, shards=even_shares(shapes, RANKS - 1, RANKS), seed=1)
    gradients = [np.zeros(shard.size, np.float32) for shard in noise.shards]

    def add(array: int, start: int, piece: Any) -> None:
        gradients[array][start : start + len(piece)] += piece

    times = []
    for _ in range(9):
        start = time.process_time()
        noise.feed(add)
        times.append(time.process_time() - start)
    print(f"CPU, one thread per rank: {min(times):.2f} s of processor time per step")
    # The kernel reads what is kept once for four steps, and three of the four rows once more.
    moved = 4 * ((BANDWIDTH + 2) / 4 + 3) * total / RANKS
    seconds = moved / GPU_BYTES_PER_SECOND
    print(f"GPU, one fused kernel: {moved / 1e9:.2f} GB moved, {1e3 * seconds:.1f} ms per step (on paper)")


if __name__ == "__main__":
    main()
