"""Trees of JAX arrays as lists of numpy arrays, which checkpoints hold, and back."""

from __future__ import annotations

from typing import Any

import numpy as np


def _is_key(jax: Any, leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def bits(jax: Any, leaf: Any) -> np.ndarray[Any, Any]:
    """A leaf as a numpy array: the data of a random key, and types that numpy does not know as integers."""
    array = np.asarray(jax.random.key_data(leaf) if _is_key(jax, leaf) else leaf)
    return array.view(f"u{array.itemsize}") if array.dtype.kind == "V" else array


def packed(jax: Any, tree: Any) -> list[Any]:
    """The leaves of a tree as arrays that a checkpoint can hold."""
    return [bits(jax, leaf) for leaf in jax.tree.leaves(tree)]


def unpacked(jax: Any, saved: Any, like: Any, path: Any) -> Any:
    """The tree that was packed.

    Args:
      jax: the module.
      saved: what `packed` returned.
      like: a tree of the same structure, shapes and precisions; with others, ValueError is raised.
      path: the file that it was saved in, for the message.
    """
    leaves, structure = jax.tree.flatten(like)
    mine = [bits(jax, leaf) for leaf in leaves]
    if [(a.shape, a.dtype) for a in map(np.asarray, saved)] != [(a.shape, a.dtype) for a in mine]:
        raise ValueError(f"checkpoint must be of a model like this one, {path} has other shapes or precisions")
    restored = []
    for array, leaf in zip(saved, leaves, strict=True):
        if _is_key(jax, leaf):
            restored.append(jax.random.wrap_key_data(jax.numpy.asarray(array), impl=jax.random.key_impl(leaf)))
        else:
            value = jax.numpy.asarray(np.asarray(array).view(np.asarray(leaf).dtype))
            # What is spread over several devices now stays so, however many devices it was saved from.
            spread = isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1
            restored.append(jax.device_put(value, leaf.sharding) if spread else value)
    return jax.tree.unflatten(structure, restored)
