"""One step: each of its methods alone, and what is released, bit by bit."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dpmf
from dpmf.errors import TrainingError
from dpmf.training import BatchSampler, NoiseStream

torch = pytest.importorskip("torch")
from dpmf.training.step import Part, Step, digest, split  # noqa: E402

MECHANISM = dpmf.Mechanism(dpmf.strategies.bsr(2), dpmf.BallsInBins(2, 4))
RECORDS, SIGMA, CLIP = 20, 1.5, 0.4
SHAPES = [(3, 2), (5,)]


def begun(dtype: str = "float32", **options: Any) -> Step:
    batches = BatchSampler(RECORDS, MECHANISM, seed=3, **options)
    parameters = [torch.zeros(shape, dtype=getattr(torch, dtype)) for shape in SHAPES]
    return Step(batches.run(MECHANISM, SIGMA, CLIP), batches, stream(), parameters)


def stream() -> NoiseStream:
    return NoiseStream(MECHANISM, SHAPES, seed=3, backend="torch")


def gradients(records: int, seed: int = 0) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(records, *shape, generator=generator) for shape in SHAPES]


def deliver(step: Step, first: int = 0, size: int | None = None) -> int:
    """The part of the current batch that begins at a row."""
    rows = step.rows
    count = len(rows) - first if size is None else size
    step.begin(Part(step.t, int(rows[first]) if count else -1, count))
    return count


def test_what_is_released_is_the_rounded_sum_of_both_over_the_divisor() -> None:
    step, noise = begun(), stream()
    for t in range(3):
        step.add(gradients(deliver(step), seed=t))
        assert (step.complete, step.half_made, step.t) == (True, True, t)
        summed, unit = [total.clone().numpy() for total in step.summed.totals], step.summed.grid
        released = step.release()
        assert (step.half_made, step.t) == (False, t + 1)
        for total, row, found in zip(summed, noise.next(), released, strict=True):
            for one, normal, given in zip(total, row.reshape(-1).tolist(), found.tolist(), strict=True):
                noise_ = Fraction(normal) * Fraction(SIGMA) * Fraction(CLIP)
                exact = (Fraction(one) * Fraction(unit) + noise_) / Fraction(step.run.divisor)
                size = (abs(Fraction(one) * Fraction(unit)) + abs(noise_)) / Fraction(step.run.divisor)
                assert abs(Fraction(given) - exact) <= abs(exact) * Fraction(1, 2**24) + size * Fraction(1, 2**50)


def test_parts_are_added_to_the_same_bits() -> None:
    whole, parts = begun(), begun()
    samples = gradients(deliver(whole))
    whole.add(samples)
    size = len(samples[0])
    for first in range(0, size, 2):
        count = min(2, size - first)
        deliver(parts, first, count)
        parts.add([sample[first : first + count] for sample in samples])
        assert parts.complete == (first + count == size)
    for a, b in zip(whole.release(), parts.release(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda step: step.add(gradients(1)), "which has delivered none"),
        (lambda step: step.release(), "which has delivered none"),
        (lambda step: (step.begin(Part(2, 0, 3)), step.add(gradients(3))), "it was made on batch 2:"),
        (lambda step: step.add(gradients(deliver(step) + 1)), r"it has \d: give the model every record once"),
        (lambda step: (deliver(step), step.release()), r"must have one gradient for each of the \d records .* has 0"),
        (lambda step: (deliver(step, 1), step.add(gradients(step.size))), "a part of batch 0 was left out"),
        (lambda step: (deliver(step, 0, 1), step.add(gradients(1)), step.release()), "some were left out"),
        (lambda step: (made(step), step.add(gradients(1))), "it was made on batch 0 again"),
        (lambda step: [made(step) for _ in range(9)], "all 8 steps that were accounted for have been made"),
    ],
)
def test_what_is_not_the_step_accounted_for_is_refused(misuse: Any, message: str) -> None:
    step = begun()
    with pytest.raises(TrainingError, match=message):
        misuse(step)


def made(step: Step) -> None:
    if step.t < step.run.steps:
        step.add(gradients(deliver(step)))
    step.release()


def test_an_empty_batch_is_noise_alone() -> None:
    batches = BatchSampler(4, MECHANISM, seed=5)
    step = Step(batches.run(MECHANISM, SIGMA, CLIP), batches, stream(), [torch.zeros(shape) for shape in SHAPES])
    noise = stream()
    while len(step.rows):
        made(step)
        noise.next()
    deliver(step)
    for found, row in zip(step.release(), noise.next(), strict=True):
        np.testing.assert_allclose(found.numpy(), SIGMA * CLIP * row.reshape(-1).numpy(), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_finish_divides_by_the_public_divisor_and_rounds_once(dtype: str) -> None:
    step = begun(dtype, records=18)
    assert step.run.divisor == 4.5
    step.add(gradients(deliver(step)))
    sums, noise = [total.clone() * step.summed.grid for total in step.summed.totals], stream().next()
    released = step.release()
    expected = [
        ((total + SIGMA * CLIP * row.reshape(-1).double()) / 4.5).to(getattr(torch, dtype))
        for total, row in zip(sums, noise, strict=True)
    ]
    seen: list[Any] = []
    assert step.finish(released, lambda: seen.extend(p.grad for p in step._parameters) or "done") == "done"
    for found, wanted, shape in zip(seen, expected, SHAPES, strict=True):
        assert found.shape == shape
        assert found.dtype == getattr(torch, dtype)
        torch.testing.assert_close(found.reshape(-1), wanted, rtol=2 * torch.finfo(wanted.dtype).eps, atol=0)

    def diverges() -> None:
        step._parameters[0].fill_(torch.inf)

    step.add(gradients(deliver(step)))
    with pytest.raises(TrainingError, match="the weights are not finite after step 1"):
        step.finish(step.release(), diverges)


def test_the_journal_is_written_before_anything_is_given_out(tmp_path: Path) -> None:
    step = begun()
    step.journal.begin(tmp_path / "c", 0)
    step.add(gradients(deliver(step)))
    released = step.release()
    (line,) = step.journal.files[0].read_text().splitlines()[1:]
    assert line.startswith("step 0 ")
    assert digest(released) != digest(released[:1])


def test_agree_says_what_is_wrong() -> None:
    step = begun()
    step.agree(None)
    with pytest.raises(TrainingError, match="too bad"):
        step.agree("too bad")


def test_batches_are_split_without_splitting_users() -> None:
    rows = np.arange(10)
    assert split(rows, 4) == [slice(0, 4), slice(4, 8), slice(8, 10)]
    assert split(rows[:0], 4) == []
    users = np.array([0, 0, 0, 1, 2, 2, 2, 2, 2, 3])
    assert split(rows, 4, users) == [slice(0, 4), slice(4, 9), slice(9, 10)]
    assert split(rows, 1, users) == [slice(0, 3), slice(3, 4), slice(4, 9), slice(9, 10)]
    assert split(rows, 100, users) == [slice(0, 10)]
