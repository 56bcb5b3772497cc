"""Handwritten digits with JAX in seconds: a network trained privately in compiled steps, and resumed on the way.

    python examples/jax_digits.py
    python examples/jax_digits.py --epsilon 4 --bandwidth 1

Needs the extra [jax] of dpmf and scikit-learn.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import dpmf
from dpmf.formatting import upper
from dpmf.training.jax import make_private

RECORDS, HIDDEN = 1500, 64


def network(seed: int) -> Any:
    """The weights of a network with one hidden layer."""
    rng = np.random.default_rng(seed)
    shapes = {"hidden": (64, HIDDEN), "bias": (HIDDEN,), "out": (HIDDEN, 10)}
    return {name: jnp.asarray(rng.normal(0, len(shape) // 2 / 8, shape), jnp.float32) for name, shape in shapes.items()}


def scores(weights: Any, image: Any) -> Any:
    return jax.nn.relu(image @ weights["hidden"] + weights["bias"]) @ weights["out"]


def loss(weights: Any, record: Any) -> Any:
    """Of one record: dpmf makes it a batch, and clips the gradient of each."""
    image, label = record
    return optax.softmax_cross_entropy_with_integer_labels(scores(weights, image), label)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--delta", type=float, default=1e-4)
    parser.add_argument("--bandwidth", type=int, default=4, help="1 is independent noise")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--rate", type=float, default=0.5)
    parser.add_argument("--accountant", default="renyi", help="best needs less noise and more time")
    words = parser.parse_args()

    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images, labels = (digits.data[order] / 16).astype(np.float32), digits.target[order]
    data = jnp.asarray(images[:RECORDS]), jnp.asarray(labels[:RECORDS])

    mechanism = dpmf.Mechanism(dpmf.strategies.bsr(words.bandwidth), dpmf.reshuffled(words.epochs, 20))
    private = make_private(
        mechanism,
        records=RECORDS,
        clip_norm=1.0,
        target_epsilon=words.epsilon,
        target_delta=words.delta,
        accountant=words.accountant,
    )
    print(f"{mechanism.name}: σ = {upper(private.noise_multiplier, 4)}, batches of {private.max_batch_size} rows")
    gradient = private.gradient(loss)
    optimizer = optax.chain(private.noise, optax.sgd(optax.cosine_decay_schedule(words.rate, private.steps)))

    @jax.jit
    def some(weights: Any, state: Any) -> Any:
        """An epoch of compiled steps."""

        def step(carry: Any, _: None) -> Any:
            weights, state = carry
            clipped = gradient(weights, data, private.batch(state))
            updates, state = optimizer.update(clipped, state, weights)
            return (optax.apply_updates(weights, updates), state), None

        return jax.lax.scan(step, (weights, state), None, length=20)[0]

    weights = network(0)
    state = optimizer.init(weights)
    with tempfile.TemporaryDirectory() as place:
        for epoch in range(words.epochs):
            if epoch == words.epochs // 2:  # as if another process went on from here
                private.save(Path(place) / "run.dpmf", (weights, state))
                weights, state = private.load(Path(place) / "run.dpmf", (weights, state))
            weights, state = some(weights, state)
    right = np.mean(np.argmax(scores(weights, images[RECORDS:]), axis=1) == labels[RECORDS:])
    print(f"test accuracy {100 * right:.1f} %")
    print(private.statement())


if __name__ == "__main__":
    main()
