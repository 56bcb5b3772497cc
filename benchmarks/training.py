"""Training noise: a step of correlated noise beside Opacus' own, the memory kept, and what the secure generator costs.

    python -m benchmarks training

All get the same summed gradients of models with 10⁶ and 10⁷ parameters on the CPU with one thread and turn them into
noisy gradients. Times are processor seconds, the best of several steps taken in turns; those of opake, which has an
environment of its own, are taken right after the others. On a GPU, if there is one, 10⁷ and 10⁸ parameters are timed
beside independent noise.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np

from benchmarks import peers
from dpmf.batching import BallsInBins
from dpmf.mechanism import Mechanism
from dpmf.strategies.base import Strategy
from dpmf.strategies.buffered import GivenBuffers
from dpmf.strategies.closed_form import bisr, bsr, dpsgd

SIZES = (1_000_000, 10_000_000)
GPU_SIZES = (10_000_000, 100_000_000)
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

    from dpmf.training.noise import NoiseStream
    from dpmf.training.sampler import BatchSampler
    from dpmf.training.step import Part, Step

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

    def release(one: Step) -> Callable[[], float]:
        def timed() -> float:
            rows = one.rows
            one.begin(Part(one.t, int(rows[0]) if len(rows) else -1, len(rows)))
            one.add([p.new_zeros((len(rows), *p.shape)) for p in layers])
            start = time.process_time()
            one.finish(one.release(), lambda: None)
            return time.process_time() - start

        return timed

    steps = {"Opacus": step(DPOptimizer(torch.optim.SGD(layers, lr=0.1), **options))}
    memory = {"Opacus": 0.0}
    for name, strategy, how in ROWS:
        mechanism = Mechanism(strategy, BallsInBins(10, 10))
        noise = NoiseStream(mechanism, [tuple(p.shape) for p in layers], backend="torch", seed=1, **how)
        batches = BatchSampler(10, mechanism, seed=1)  # few records: only what follows is timed
        steps[name] = release(Step(batches.run(mechanism, 1.0, 1.0), batches, noise, layers))
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
    try:
        theirs = peers.run("opake", OPAKE, {"parameters": parameters, "rounds": ROUNDS})
    except ImportError as missing:
        print(f"opake is left out: {missing}", file=sys.stderr)
        theirs = {}
    for name, seconds in {**theirs, **jax_privacy(parameters)}.items():
        print(f"{name:20} {1e3 * seconds:7.1f} {seconds / best['Opacus']:9.2f}", flush=True)


OPAKE = """
import json, sys, time
import torch
from opake.dpftrl import noise
from opake.random import key
from opake.types import ClippedPytree

torch.set_num_threads(1)
asked = json.loads(sys.argv[1])
gradients = [torch.zeros(500, asked["parameters"] // 1000) for _ in range(2)]
strategies = {
    "opake, independent": noise.identity_strategy(),
    "opake, BSR(p=4)": noise.bsr_strategy(bandwidth=4, alpha=1.0, beta=0.0),
    "opake, BISR(p=4)": noise.bisr_strategy(bandwidth=4, normalized=False),
    "opake, BSR(p=16)": noise.bsr_strategy(bandwidth=16, alpha=1.0, beta=0.0),
    "opake, BSR(p=64)": noise.bsr_strategy(bandwidth=64, alpha=1.0, beta=0.0),
    "opake, BLT": noise.blt_strategy(max_buffers=4),
}
run = {
    name: noise.mf_gaussian_noise(
        gradients, strategy, n_steps=100, min_sep=10, max_participations=10, noise_multiplier=1.0, key=key(1)
    )
    for name, strategy in strategies.items()
}
best = dict.fromkeys(run, float("inf"))
for _ in range(asked["rounds"] + 1):
    for name, (step, state) in run.items():
        summed = ClippedPytree([g.clone() for g in gradients], 1.0)
        began = time.process_time()
        _, state = step(summed, state)
        best[name] = min(best[name], time.process_time() - began)
        run[name] = step, state
print(json.dumps(best))
"""


def jax_privacy(parameters: int) -> dict[str, float]:
    """Seconds of jax-privacy's compiled noise, whose state is handed over so that it can be changed in place."""
    import jax
    import jax.numpy as jnp
    from jax_privacy import noise_addition
    from jax_privacy.matrix_factorization import toeplitz

    gradients = [jnp.zeros((500, parameters // 1000), jnp.float32) for _ in range(2)]
    best = {}
    columns = {"independent": np.ones(1), "BSR(p=4)": bsr(4).strategy_coef(4), "BSR(p=16)": bsr(16).strategy_coef(16)}
    for name, column in columns.items():
        matrix = toeplitz.inverse_as_streaming_matrix(jnp.asarray(column, jnp.float32))
        privatizer = noise_addition.matrix_factorization_privatizer(matrix, stddev=1.0, prng_key=1)
        state, update = privatizer.init(gradients), jax.jit(privatizer.update, donate_argnums=1)
        times = []
        for _ in range(ROUNDS):
            began = time.process_time()
            _, state = jax.block_until_ready(update(gradients, state))
            times.append(time.process_time() - began)
        best[f"jax-privacy, {name}"] = min(times)
    return best


def on_gpu() -> None:
    """Noise added to a gradient on the GPU, beside independent noise by torch."""
    import torch

    from dpmf.training.noise import NoiseStream

    for parameters in GPU_SIZES:
        gradient = torch.zeros(parameters, device="cuda")

        def independent(gradient: torch.Tensor = gradient) -> None:
            gradient + torch.normal(0.0, 0.5, gradient.shape, device="cuda")  # as Opacus adds it

        baseline = _gpu_seconds(independent)
        print(f"noise step, {parameters:.0e} parameters, GPU\n{'independent':20} {1e3 * baseline:7.3f} ms")
        for name, strategy, how in ROWS:
            mechanism = Mechanism(strategy, BallsInBins(10, 100))
            stream = NoiseStream(mechanism, [(parameters,)], backend="torch", device="cuda", seed=1, **how)
            if stream.state_bytes > torch.cuda.mem_get_info()[0] // 2:
                continue
            took = _gpu_seconds(lambda stream=stream, gradient=gradient: stream.add_to([gradient], 0.5))
            print(f"{name:20} {1e3 * took:7.3f} ms {took / baseline:6.2f} × independent", flush=True)


def _gpu_seconds(step: Callable[[], None], repetitions: int = 96) -> float:
    """The mean over many steps: a launch may do the work of several."""
    import torch

    for _ in range(12):
        step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repetitions):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / repetitions


if __name__ == "__main__":
    main()
