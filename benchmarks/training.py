"""Training noise: a step of correlated noise beside Opacus' own, the memory kept, and what the secure generator costs.

    python -m benchmarks training

Both optimisers get the same summed gradients of models with 10⁶ and 10⁷ parameters on the CPU with one thread and turn
them into noisy gradients. Times are processor seconds, the best of several steps taken in turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from dpmf.batching import BallsInBins
from dpmf.mechanism import Mechanism
from dpmf.strategies.base import Strategy
from dpmf.strategies.buffered import GivenBuffers
from dpmf.strategies.closed_form import bisr, bsr, dpsgd

SIZES = (1_000_000, 10_000_000)
ROUNDS = 15
ROWS: list[tuple[str, Strategy, dict[str, str]]] = [
    ("DP-SGD", dpsgd(), {}),
    ("BSR(p=4)", bsr(4), {}),
    ("BISR(p=4)", bisr(4), {}),
    ("BSR(p=4), float64", bsr(4), {"dtype": "float64"}),
    ("BSR(p=16)", bsr(16), {}),
    ("BSR(p=64)", bsr(64), {}),
    ("BLT(d=4)", GivenBuffers((0.99, 0.9, 0.7, 0.3), (0.1, 0.2, 0.2, 0.3)), {}),
    ("BSR(p=4), secure", bsr(4), {"source": "secure"}),
]


def main() -> None:
    import torch

    torch.set_num_threads(1)
    for parameters in SIZES:
        on_cpu(parameters)
    if torch.cuda.is_available():
        on_gpu()


def on_cpu(parameters: int) -> None:
    """Opacus' noise step and ours, for one size of the model."""
    import torch
    from opacus.optimizers import DPOptimizer

    from dpmf.training._loader import Deliveries
    from dpmf.training._optimizer import CorrelatedDPOptimizer
    from dpmf.training.noise import NoiseStream
    from dpmf.training.sampler import BatchSampler

    options = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "expected_batch_size": 1}
    layers = [torch.nn.Parameter(torch.zeros(500, parameters // 1000)) for _ in range(2)]
    gradients = [torch.zeros_like(p) for p in layers]

    def step(optimizer: DPOptimizer) -> Callable[[], float]:
        def timed() -> float:
            for p, gradient in zip(layers, gradients, strict=True):
                p.summed_grad, p.grad_sample, p.grad = gradient.clone(), [], None
            start = time.process_time()
            optimizer.add_noise()
            return time.process_time() - start

        return timed

    steps = {"Opacus": step(DPOptimizer(torch.optim.SGD(layers, lr=0.1), **options))}
    memory = {"Opacus": 0.0}
    for name, strategy, how in ROWS:
        mechanism = Mechanism(strategy, BallsInBins(10, 10))
        noise = NoiseStream(mechanism, [tuple(p.shape) for p in layers], backend="torch", seed=1, **how)
        deliveries = Deliveries(BatchSampler(100, mechanism, seed=1), lambda: 0)  # only add_noise is called
        optimizer = CorrelatedDPOptimizer(
            torch.optim.SGD(layers, lr=0.1), noise=noise, deliveries=deliveries, **options
        )  # fmt: skip
        steps[name] = step(optimizer)
        memory[name] = noise.state_bytes / (4 * parameters)
    for timed in steps.values():  # memory is taken in the first step
        timed()
    best = dict.fromkeys(steps, np.inf)
    for _ in range(ROUNDS):
        for name, timed in steps.items():
            best[name] = min(best[name], timed())
    print(f"noise step, {parameters:.0e} parameters, CPU, one thread")
    print(f"{'noise':20} {'ms':>7} {'× Opacus':>9} {'model copies kept':>18}")
    for name in steps:
        print(f"{name:20} {1e3 * best[name]:7.1f} {best[name] / best['Opacus']:9.2f} {memory[name]:18.0f}", flush=True)


def on_gpu() -> None:
    """Noise added to a gradient on the GPU: BSR(p=4) beside independent noise by torch."""
    import torch

    from dpmf.training.noise import NoiseStream

    parameters = SIZES[-1]
    gradient = torch.zeros(parameters, device="cuda")
    stream = NoiseStream(
        Mechanism(bsr(4), BallsInBins(10, 10)), [(parameters,)], backend="torch", device="cuda", seed=1
    )

    def correlated() -> None:
        stream.feed(lambda _, start, piece: gradient[start : start + len(piece)].add_(piece, alpha=0.5))

    def independent() -> None:
        gradient + torch.normal(0.0, 0.5, (parameters,), device="cuda")  # as Opacus adds it

    for name, step in (("BSR(p=4), GPU", correlated), ("independent, GPU", independent)):
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(50):
            step()
        torch.cuda.synchronize()
        print(f"{name:20} {1e3 * (time.perf_counter() - start) / 50:7.2f} ms")


if __name__ == "__main__":
    main()
