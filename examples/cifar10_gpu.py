"""Many runs on CIFAR-10 at once on one GPU: each has a stream, buffers and captured graphs of its step.

What is computed is what `study_runs.Task.run` computes, with layers and per-record gradients in bfloat16. The same seed
gives the same initial model, batches and noise. One run alone was found to repeat bit for bit; with several at once the
models differed by 0.002 at most after 60 steps, less than what the noise of one step adds. The cause is not known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import cifar10_data
import cifar10_grid
import cifar10_kernels as kernels
import numpy as np
import torch
from study_runs import Array, Mechanism, Optimizer, Run, Task, batches, noise_rows

STREAMS = 4
MOST = 640  # records in a batch; one of 515 expected records exceeds it less than once in 10⁷ batches
STEPS = 970


def _copied(numbers: torch.Tensor) -> torch.Tensor:
    """On the GPU, and there before any stream uses it."""
    out = numbers.cuda()
    torch.cuda.current_stream().synchronize()
    return out


class ManyRuns(Task):
    def __init__(self, images: Array, labels: Array, test: Array, test_labels: Array):
        device = torch.device("cuda")
        torch.backends.cuda.matmul.allow_tf32 = False
        self.records, self.held, self.clip = len(labels), max(1, len(labels) // 10), cifar10_grid.CLIP
        self.labels = torch.from_numpy(np.concatenate([labels, test_labels])).to(device)
        mean, std = (torch.tensor(v, device=device).view(1, 3, 1, 1) for v in (cifar10_data.MEAN, cifar10_data.STD))
        data = kernels.patches(torch.from_numpy(np.concatenate([images, test])).to(device), mean, std)
        offsets = [0, *np.cumsum([int(np.prod(shape)) for shape in cifar10_grid.shapes()]).tolist()]
        self.steps = [kernels.Step(data, self.labels, MOST, STEPS, self.clip, offsets) for _ in range(STREAMS)]
        self.streams = [torch.cuda.Stream() for _ in self.steps]
        self.normals = [torch.empty(STEPS + 200, offsets[-1], device=device) for _ in self.steps]
        self.graphs: dict[tuple[int, int, str], torch.cuda.CUDAGraph] = {}
        self.optimizers = [{n: Optimizer(n, step.theta, STEPS) for n in Optimizer.NAMES} for step in self.steps]
        self.starts: dict[int, torch.Tensor] = {}
        self.tables: dict[tuple[object, ...], tuple[torch.Tensor, Array]] = {}
        self.matrices: dict[tuple[str, str, float], torch.Tensor] = {}
        self.numbers: dict[tuple[str, str, float, float], torch.Tensor] = {}
        chunks = -(-max(len(test_labels), self.held) // MOST)
        self.chunk = torch.arange(chunks, dtype=torch.int32, device=device).repeat_interleave(4)
        self.scored = {flag: self._scored(flag, chunks) for flag in (False, True)}
        self.steps[0](32)  # compiles the kernels
        torch.cuda.synchronize()

    def _scored(self, held_out: bool, chunks: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Indices of the records to score on, in rows of MOST, their labels (−1 where there is none), their number."""
        kept = self.split(held_out)[1]
        index = np.arange(self.records, len(self.labels)) if kept is None else kept
        places = np.zeros(chunks * MOST, dtype=np.int32)
        places[: len(index)] = index
        truth = self.labels[torch.from_numpy(places).long().cuda()]
        truth[len(index) :] = -1
        return torch.from_numpy(places).cuda().view(chunks, MOST), truth.view(chunks, MOST), len(index)

    def _table(self, mechanism: Mechanism, run: Run) -> tuple[torch.Tensor, Array]:
        """Indices of the batches, padded, and their sizes; mechanisms with the same batching share them."""
        key = (*(mechanism.get(part) for part in ("epochs", "batches", "batching", "period")), run.seed, run.held_out)
        if key not in self.tables:
            kept = self.split(run.held_out)[0]
            found = batches(mechanism, len(kept), run.seed)
            index = np.zeros((len(found), MOST), dtype=np.int32)
            for row, batch in zip(index, found, strict=True):
                row[: len(batch)] = kept[batch]
            self.tables[key] = torch.from_numpy(index).pin_memory(), np.array([len(batch) for batch in found], np.int32)
        return self.tables[key]

    def _width(self, size: int, expected: float) -> int:
        """How many records are computed for a batch: a few widths only, since each needs a graph."""
        return 32 * -(-max(size, int(expected - expected**0.5)) // 32)

    def _graph(self, place: int, width: int, name: str) -> torch.cuda.CUDAGraph:
        if (place, width, name) not in self.graphs:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.steps[place](width, self.optimizers[place].get(name))
            self.graphs[place, width, name] = graph
        return self.graphs[place, width, name]

    def _begin(self, place: int, mechanism: Mechanism, run: Run) -> list[torch.cuda.CUDAGraph]:
        """Load a run into the buffers of a stream; returns the graph of each of its steps."""
        step, index_sizes = self.steps[place], self._table(mechanism, run)
        if run.seed not in self.starts:
            self.starts[run.seed] = _copied(cifar10_grid.initial(run.seed))
        key = mechanism["setting"], mechanism["name"], mechanism["epsilon"]
        if key not in self.matrices:
            self.matrices[key] = _copied(torch.from_numpy(mechanism["sigma"] * self.clip * noise_rows(mechanism)))
        expected = len(self.split(run.held_out)[0]) / mechanism["batches"]
        name = mechanism.get("optimizer", "")
        graphs = [self._graph(place, self._width(int(size), expected), name) for size in index_sizes[1]]
        matrix = self.matrices[key]
        with torch.cuda.stream(self.streams[place]):
            step.index[: len(graphs)].copy_(index_sizes[0], non_blocking=True)
            step.counts[: len(graphs)].copy_(torch.from_numpy(index_sizes[1]).pin_memory(), non_blocking=True)
            step.theta.copy_(self.starts[run.seed])
            step.theta16.copy_(step.theta)
            step.rate.fill_(run.learning_rate / expected)
            step.inverse.fill_(-1 / expected)
            if name:
                if (*key, expected) not in self.numbers:
                    self.numbers[*key, expected] = Optimizer.numbers(mechanism, self.clip, expected).pin_memory()
                self.optimizers[place][name].begin(self.numbers[*key, expected], run.learning_rate)
            step.step.zero_()
            normals = self.normals[place][: matrix.shape[1]]
            normals.normal_(generator=torch.Generator("cuda").manual_seed(run.seed + 12345))
            torch.mm(matrix, normals, out=step.noise[: len(graphs)])
        return graphs

    def _score(self, place: int, run: Run) -> torch.Tensor:
        index, truth, _ = self.scored[run.held_out]
        step = self.steps[place]
        right = torch.zeros((), device="cuda", dtype=torch.int64)
        weight, bias = (step.theta16[a:b] for a, b in zip(step.offsets[-3:-1], step.offsets[-2:], strict=True))
        for chunk, labels in enumerate(truth):
            step.forward(MOST, index, self.chunk[4 * chunk :])
            feature = step.feature.view(MOST, 4, 128).permute(0, 2, 1).reshape(MOST, 512)
            right += ((feature @ weight.view(10, 512).T + bias).argmax(1) == labels).sum()
        return right

    def perform(self, mechanisms: Sequence[Mechanism], runs: Sequence[Run]) -> Iterator[tuple[Run, float]]:
        """Waves of as many runs as there are streams; a wave's results are read when the next one has been queued."""
        waiting: list[tuple[Run, torch.Tensor, torch.cuda.Event]] = []
        for start in range(0, len(runs), STREAMS):
            wave = runs[start : start + STREAMS]
            for run in wave:  # on the CPU, while the GPU works on the wave before
                self._table(mechanisms[run.mechanism], run)
            plans = [self._begin(p, mechanisms[run.mechanism], run) for p, run in enumerate(wave)]
            for graphs in zip(*plans, strict=True):
                for place, graph in enumerate(graphs):
                    with torch.cuda.stream(self.streams[place]):
                        graph.replay()
            scores = []
            for place, run in enumerate(wave):
                with torch.cuda.stream(self.streams[place]):
                    scores.append((run, self._score(place, run), self.streams[place].record_event()))
            yield from map(self._read, waiting)
            waiting = scores
        yield from map(self._read, waiting)

    def _read(self, score: tuple[Run, torch.Tensor, torch.cuda.Event]) -> tuple[Run, float]:
        run, right, done = score
        done.synchronize()
        return run, int(right) / self.scored[run.held_out][2]
