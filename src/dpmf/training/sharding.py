"""Noise for models that several processes share: every rank draws and keeps the noise of its own elements only.

    noise = NoiseStream(mechanism, shapes, shards=shards_of(parameters), seed=key, backend="torch")
    add_noise([p.grad for p in parameters], noise, scale=noise_multiplier * max_grad_norm)
    save("checkpoint", noise)

The noise of an element depends on the key, the step, the number of the array and the number of the element in it, and
on nothing else. Any number of ranks adds the same bits, and a run that four ranks saved can be resumed by two.
`make_private` does all of this by itself for models in `DifferentiallyPrivateDistributedDataParallel`.

A sharded checkpoint is one small file and a part for every rank beside it. Parts are written first, under names of
their own; the file that names them is replaced last, atomically; parts that it does not name are removed then. A rank
that is killed at any moment leaves the old checkpoint or the new one.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dpmf import errors
from dpmf.errors import ArgumentError, TrainingError
from dpmf.training import checkpoint
from dpmf.training._shards import Shard, even_shares
from dpmf.training.noise import NoiseStream

__all__ = ["Shard", "add_noise", "all_or_none", "check_ranks", "even_shares", "load", "save", "shards_of"]


def shards_of(tensors: Iterable[Any]) -> list[Shard]:
    """The part of every tensor that this rank holds.

    Args:
      tensors: parameters or gradients: a `DTensor`, such as those of a model in FSDP2's `fully_shard`, or an ordinary
        tensor, of which this rank has everything.
    """
    return [_shard_of(tensor) for tensor in tensors]


def _shard_of(tensor: Any) -> Shard:
    placements = getattr(tensor, "placements", ())
    whole = tuple(tensor.shape)
    offset, shape = [0] * len(whole), list(whole)
    for mesh_dimension, placement in enumerate(placements):
        if type(placement).__name__ == "Replicate":
            continue
        if type(placement).__name__ != "Shard":
            raise ArgumentError("tensors", f"must be sharded or replicated, one is placed as {placement}")
        mesh, d = tensor.device_mesh, placement.dim % len(whole)
        # Parts are as long as those of torch.chunk, so that the last ones may be shorter or empty.
        step = -(-shape[d] // mesh.size(mesh_dimension))
        first = min(step * mesh.get_local_rank(mesh_dimension), shape[d])
        offset[d] += first
        shape[d] = min(step, shape[d] - first)
    if placements and tuple(tensor.to_local().shape) != tuple(shape):
        raise ArgumentError("tensors", f"must be cut as by torch.chunk, one with shape {whole} is cut in another way")
    return Shard(whole, tuple(offset), tuple(shape))


def check_ranks(noise: NoiseStream) -> None:
    """Raise `TrainingError` on all ranks unless together they hold everything once, with one key and at one step.

    Every rank of the default process group must call this. Ranks that hold the very same shards, because the model is
    replicated, count as one. Once the shards have been found to be complete, only the rest is compared.
    """
    dimensions = [len(shard.whole) for shard in noise.shards]
    same = (*noise._identity.items(), noise._source.name, noise._source.key.hex(), noise.step, dimensions)
    digest = np.frombuffer(hashlib.sha256(repr(same).encode()).digest(), dtype="<i8")
    if len(np.unique(_gathered(digest), axis=0)) != 1:
        raise TrainingError(
            f"all ranks must have the same mechanism, parameters, seed and step ({noise.step} here), they differ: "
            "begin all of them with the same arguments, from the same checkpoint"
        )
    if noise.complete:
        return
    boxes = _gathered(np.array([n for s in noise.shards for n in (*s.whole, *s.offset, *s.shape)], dtype=np.int64))
    at = 0
    for array, d in enumerate(dimensions):
        whole, first, shape = np.split(np.unique(boxes[:, at : at + 3 * d], axis=0), [d, 2 * d], axis=1)
        at += 3 * d
        filled = np.all(shape > 0, axis=1)
        if (
            np.any(whole != whole[:1])
            or sum(map(math.prod, shape[filled].tolist())) != math.prod(whole[0].tolist())
            or _any_common(first[filled], shape[filled])
        ):
            raise TrainingError(
                f"the shards of array {array} on the {len(boxes)} ranks must be all of it, each element once, they "
                "are not: a rank is missing, or was begun for another number of ranks"
            )
    noise.complete = True


def _any_common(first: Any, shape: Any) -> bool:
    """Whether any two of these boxes have an element in common."""
    last = first + shape
    return any(
        bool(np.any(np.all(np.minimum(last[i], last[i + 1 :]) > np.maximum(first[i], first[i + 1 :]), axis=1)))
        for i in range(len(first))
    )


def _gathered(values: Any) -> Any:
    """The integers of all ranks, one row each."""
    import torch.distributed as dist

    mine = _integers(values)
    everybody = [_integers(values) for _ in range(dist.get_world_size())]
    with lost_ranks():
        dist.all_gather(everybody, mine)
    return np.stack([told.cpu().numpy() for told in everybody])


def _integers(values: Any) -> Any:
    """Integers where the process group can send them from."""
    import torch

    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    return torch.tensor(np.asarray(values, dtype=np.int64), device=device)


@contextlib.contextmanager
def lost_ranks(what: str = "nothing of this step was released") -> Iterator[None]:
    """Turn the errors of a process group that has lost a rank into one line."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, TrainingError):
            raise
        reason = (str(error).splitlines() or [""])[0]
        raise TrainingError(
            f"another rank does not answer, it has ended or cannot be reached: {what}; begin all ranks again from the "
            f"last checkpoint ({reason[:100]})"
        ) from None


@contextlib.contextmanager
def all_or_none(what: str, *, distributed: bool = True) -> Iterator[None]:
    """Run the block on all ranks; if it raises on one, it raises on all."""
    failed = True
    try:
        yield
        failed = False
    finally:
        others = distributed and bool(_gathered([failed]).any())
    if others:
        raise TrainingError(f"another rank could not {what}: its message says why")


def add_noise(gradients: Sequence[Any], noise: NoiseStream, scale: float) -> None:
    """Add `scale` times the next row of C⁻¹Z to the sums of clipped gradients, each rank to its own shards.

    All ranks must call this. They make sure that all are at the same step, and that nothing is left out or added twice.

    Args:
      gradients: tensors or `DTensor`s of the shapes of the stream, sharded like its shards; they are changed.
      noise: the stream of this rank.
      scale: noise multiplier × clipping norm.
    """
    check_ranks(noise)
    local = [getattr(gradient, "to_local", lambda g=gradient: g)() for gradient in gradients]
    if [tuple(part.shape) for part in local] != [shard.shape for shard in noise.shards]:
        raise ArgumentError("gradients", "must be sharded like the noise, they have other shapes on this rank")
    noise.add_to([part.detach().view(-1) for part in local], scale)


def _part_names(path: Path, noise: NoiseStream, world: int) -> list[str]:
    """What the parts of a checkpoint are called. Another run, step or number of ranks never has the same names."""
    run = hashlib.sha256(b"part of a checkpoint" + noise._source.key).hexdigest()[:16]
    return [f"{path.name}.{run}-{noise.step}.{rank}-of-{world}.part" for rank in range(world)]


def write_part(path: str | os.PathLike[str], noise: NoiseStream, rank: int, world: int) -> dict[str, Any]:
    """Write the part of one rank, and return what goes into the file that names the parts of all ranks."""
    target = Path(path)
    names = _part_names(target, noise, world)
    state = noise.state_dict()
    checkpoint.save(target.with_name(names[rank]), state)
    return {"key": state["key"], "step": state["step"], "parts": names}


def remove_old_parts(path: str | os.PathLike[str], names: Sequence[str]) -> None:
    """Remove the parts of earlier checkpoints that the file at `path` does not name any more."""
    target = Path(path)
    part = re.compile(re.escape(target.name) + r"\.[0-9a-f]{16}-\d+\.\d+-of-\d+\.part")
    for file in target.absolute().parent.iterdir():
        if part.fullmatch(file.name) and file.name not in names:
            file.unlink(missing_ok=True)


def states(path: str | os.PathLike[str], state: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The states of the ranks that wrote a checkpoint, one after the other; the state itself if it is whole."""
    if "parts" not in state:
        yield state
        return
    for name in state["parts"]:
        part = Path(path).with_name(Path(name).name)
        try:
            found = checkpoint.load(part)
        except FileNotFoundError:
            raise ValueError(
                f"checkpoint must have all of its {len(state['parts'])} parts beside it, {part} is missing: move "
                "them together"
            ) from None
        if (found.get("key"), found.get("step")) != (state["key"], state["step"]):
            raise ValueError(f"checkpoint must have parts of one run at one step, {part} is of another")
        yield found


def save(path: str | os.PathLike[str], noise: NoiseStream, extra: Mapping[str, Any] | None = None) -> None:
    """Write a checkpoint of the noise of all ranks. Every rank must call this, and writes only what it keeps.

    Args:
      path: the file, which rank 0 replaces atomically when all parts are there.
      noise: the stream of this rank.
      extra: more plain values or arrays to keep, those of rank 0.
    """
    dist = _distributed()
    check_ranks(noise)
    rank, world = dist.get_rank(), dist.get_world_size()
    with all_or_none("write its part of the checkpoint"):
        whole = write_part(path, noise, rank, world)
    with all_or_none("write the checkpoint"):
        if rank == 0:
            checkpoint.save(path, {"noise": whole, "extra": dict(extra or {})})
            remove_old_parts(path, whole["parts"])


def load(path: str | os.PathLike[str], noise: NoiseStream) -> dict[str, Any]:
    """Continue from a checkpoint that any number of ranks wrote. Every rank must call this, and keeps its own shards.

    Args:
      path: what was given to `save`.
      noise: the stream of this rank, with its own shards.

    Returns:
      What `save` was given as `extra` on rank 0. If any rank refuses the checkpoint, all do, and nothing is changed.
    """
    _distributed()
    with all_or_none("load the checkpoint"):
        state = checkpoint.load(path)
        if not isinstance(state.get("noise"), dict):
            raise ValueError(f"checkpoint must be one that sharding.save wrote, {path} is not")
        commit = noise.prepared(states(path, state["noise"]))
    commit()
    check_ranks(noise)
    return dict(state["extra"])


def _distributed() -> Any:
    try:
        import torch.distributed as dist
    except ImportError:
        raise errors.missing_extra("torch", "torch", "sharded noise") from None
    if not dist.is_initialized():
        raise TrainingError("sharded noise needs a process group: call torch.distributed.init_process_group first")
    return dist
