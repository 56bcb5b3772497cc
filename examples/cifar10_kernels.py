"""The step of `cifar10_gpu.py` as Triton kernels: clipped gradients of a batch, their sum, the update of the model.

Activations are (record, row, column, channel) in bfloat16, per-record gradients bfloat16 rows in the order of
`cifar10_grid.shapes`; norms, sums and the model are float32. `cifar10_grid.clipped_sum` computes the same in plain
torch and is what the kernels were checked against. This module needs Triton and a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

LAYERS = (  # (side, input channels, output channels, what follows) of the second to the sixth convolution
    (32, 32, 32, "pool"),
    (16, 32, 64, "relu"),
    (16, 64, 64, "pool"),
    (8, 64, 128, "relu"),
    (8, 128, 128, "relu"),
)
# (block, warps, stages[, second block]) of each kernel and layer, as fast as any tried on an H200.
SHAPES = {
    ("first", 0): (128, 4, 3), ("forward", 1): (64, 8, 3), ("forward", 2): (256, 8, 2), ("forward", 3): (128, 4, 3),
    ("forward", 4): (64, 4, 3), ("forward", 5): (128, 8, 3), ("back", 1): (128, 8, 3), ("back", 2): (256, 8, 3),
    ("back", 3): (256, 4, 2), ("back", 4): (128, 4, 3), ("back", 5): (128, 8, 3), ("weights", 0): (128, 4, 3),
    ("weights", 1): (128, 4, 3, 32), ("weights", 2): (128, 4, 2, 64), ("weights", 3): (64, 4, 2, 64),
    ("weights", 4): (64, 4, 3, 64), ("weights", 5): (64, 8, 2, 128), ("update", 0): (256, 4, 4, 8),
}  # fmt: skip


@triton.jit
def _first(patches, index, step, width_max, w, out, BM: tl.constexpr):
    """The first convolution on stored patches (27 pixels, a one for the bias, zeros), and its ReLU."""
    pid = tl.program_id(0)
    t = tl.load(step)
    n = pid // (1024 // BM)
    record = tl.load(index + t * width_max + n)
    position = (pid % (1024 // BM)) * BM + tl.arange(0, BM)
    k = tl.arange(0, 32)
    c = tl.arange(0, 32)
    x = tl.load(patches + (record.to(tl.int64) * 1024 + position[:, None]) * 32 + k[None, :])
    flat = tl.where(k[:, None] < 27, c[None, :] * 27 + k[:, None], 864 + c[None, :])
    weight = tl.load(w + flat, mask=(k[:, None] < 28) & (c[None, :] < 32), other=0.0)
    y = tl.maximum(tl.dot(x, weight), 0.0)
    tl.store(out + (n * 1024 + position[:, None]) * 32 + c[None, :], y.to(tl.bfloat16))


@triton.jit
def _conv_relu(x, w, b, out, S: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr, BM: tl.constexpr):
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    h = row % (S * S) // S
    v = row % S
    ci = tl.arange(0, CI)
    co = tl.arange(0, CO)
    acc = tl.zeros((BM, CO), dtype=tl.float32)
    for tap in range(9):
        i = tap // 3 - 1
        j = tap % 3 - 1
        inside = (h + i >= 0) & (h + i < S) & (v + j >= 0) & (v + j < S)
        a = tl.load(x + (row + i * S + j)[:, None] * CI + ci[None, :], mask=inside[:, None], other=0.0)
        k = tl.load(w + co[None, :] * (9 * CI) + tap * CI + ci[:, None])
        acc = tl.dot(a, k, acc)
    acc = tl.maximum(acc + tl.load(b + co).to(tl.float32)[None, :], 0.0)
    tl.store(out + row[:, None] * CO + co[None, :], acc.to(tl.bfloat16))


@triton.jit
def _quarter(x, w, row, h, v, S: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr, BP: tl.constexpr):
    ci = tl.arange(0, CI)
    co = tl.arange(0, CO)
    acc = tl.zeros((BP, CO), dtype=tl.float32)
    for tap in range(9):
        i = tap // 3 - 1
        j = tap % 3 - 1
        inside = (h + i >= 0) & (h + i < S) & (v + j >= 0) & (v + j < S)
        a = tl.load(x + (row + i * S + j)[:, None] * CI + ci[None, :], mask=inside[:, None], other=0.0)
        k = tl.load(w + co[None, :] * (9 * CI) + tap * CI + ci[:, None])
        acc = tl.dot(a, k, acc)
    return acc


@triton.jit
def _conv_pool(x, w, b, out, code, S: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr, BP: tl.constexpr):
    """Convolution, ReLU and 2 × 2 max-pool; `code` keeps which of the four won, or 4 where none is positive."""
    pooled = tl.program_id(0) * BP + tl.arange(0, BP)
    half: tl.constexpr = S // 2
    n = pooled // (half * half)
    h = pooled % (half * half) // half * 2
    v = pooled % half * 2
    co = tl.arange(0, CO)
    bias = tl.load(b + co).to(tl.float32)[None, :]
    best = tl.zeros((BP, CO), dtype=tl.float32)
    which = tl.full((BP, CO), 4, dtype=tl.int32)
    for q in tl.static_range(4):
        hq = h + q // 2
        vq = v + q % 2
        y = _quarter(x, w, n * (S * S) + hq * S + vq, hq, vq, S, CI, CO, BP) + bias
        which = tl.where(y > best, q, which)
        best = tl.maximum(best, y)
    tl.store(out + pooled[:, None] * CO + co[None, :], best.to(tl.bfloat16))
    tl.store(code + pooled[:, None] * CO + co[None, :], which.to(tl.int8))


@triton.jit
def _pool4(a, out, code):
    """Both last max-pools at once: 8 × 8 to 2 × 2, 128 channels, one record per program."""
    n = tl.program_id(0)
    p = tl.arange(0, 4)
    c = tl.arange(0, 128)
    best = tl.zeros((4, 128), dtype=tl.float32)
    which = tl.full((4, 128), 16, dtype=tl.int32)
    for q in tl.static_range(16):
        place = (p // 2 * 4 + q // 4) * 8 + p % 2 * 4 + q % 4
        y = tl.load(a + (n * 64 + place)[:, None] * 128 + c[None, :]).to(tl.float32)
        which = tl.where(y > best, q, which)
        best = tl.maximum(best, y)
    tl.store(out + (n * 4 + p)[:, None] * 128 + c[None, :], best.to(tl.bfloat16))
    tl.store(code + (n * 4 + p)[:, None] * 128 + c[None, :], which.to(tl.int8))


@triton.jit
def _unpool4(d, code, out):
    n = tl.program_id(0)
    p = tl.arange(0, 4)
    c = tl.arange(0, 128)
    place = (n * 4 + p)[:, None] * 128 + c[None, :]
    value = tl.load(d + place)
    which = tl.load(code + place).to(tl.int32)
    for q in tl.static_range(16):
        target = (p // 2 * 4 + q // 4) * 8 + p % 2 * 4 + q % 4
        tl.store(out + (n * 64 + target)[:, None] * 128 + c[None, :], tl.where(which == q, value, 0.0))


@triton.jit
def _head(feature, w, labels, index, step, width_max, d, g, stride, OFFSET: tl.constexpr, norms, SLOTS: tl.constexpr):
    """The linear layer, softmax and cross-entropy of one record: its gradient, its norm, what goes back."""
    n = tl.program_id(0)
    t = tl.load(step)
    label = tl.load(labels + tl.load(index + t * width_max + n))
    k = tl.arange(0, 512)
    o = tl.arange(0, 16)
    a = tl.load(feature + n * 512 + k % 4 * 128 + k // 4).to(tl.float32)
    real = o < 10
    weight = tl.load(w + o[:, None] * 512 + k[None, :], mask=real[:, None], other=0.0).to(tl.float32)
    bias = tl.load(w + 5120 + o, mask=real, other=0.0).to(tl.float32)
    y = tl.where(real, tl.sum(weight * a[None, :], 1) + bias, -1e30)
    y = tl.exp(y - tl.max(y, 0))
    e = y / tl.sum(y, 0) - tl.where(o == label, 1.0, 0.0)
    row = g + n.to(tl.int64) * stride + OFFSET
    tl.store(row + o[:, None] * 512 + k[None, :], (e[:, None] * a[None, :]).to(tl.bfloat16), mask=real[:, None])
    tl.store(row + 5120 + o, e.to(tl.bfloat16), mask=real)
    tl.store(norms + n * SLOTS, tl.sum(e * e, 0) * (1.0 + tl.sum(a * a, 0)))
    back = tl.sum(weight * e[:, None], 0)
    tl.store(d + n * 512 + k % 4 * 128 + k // 4, back.to(tl.bfloat16))


@triton.jit
def _back(d, w, seen, out, S: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr, BM: tl.constexpr, POOLED: tl.constexpr):
    """Gradient for the input of a convolution (from CI to CO channels), through the ReLU or max-pool before it."""
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    n = row // (S * S)
    h = row % (S * S) // S
    v = row % S
    ci = tl.arange(0, CI)
    co = tl.arange(0, CO)
    acc = tl.zeros((BM, CO), dtype=tl.float32)
    for tap in range(9):
        i = tap // 3 - 1
        j = tap % 3 - 1
        inside = (h + i >= 0) & (h + i < S) & (v + j >= 0) & (v + j < S)
        a = tl.load(d + (row + i * S + j)[:, None] * CI + ci[None, :], mask=inside[:, None], other=0.0)
        k = tl.load(w + ci[:, None] * (9 * CO) + (8 - tap) * CO + co[None, :])
        acc = tl.dot(a, k, acc)
    y = acc.to(tl.bfloat16)
    if POOLED:
        which = tl.load(seen + row[:, None] * CO + co[None, :]).to(tl.int32)
        for q in tl.static_range(4):
            target = n * (4 * S * S) + (2 * h + q // 2) * (2 * S) + 2 * v + q % 2
            tl.store(out + target[:, None] * CO + co[None, :], tl.where(which == q, y, 0.0))
    else:
        active = tl.load(seen + row[:, None] * CO + co[None, :]) > 0
        tl.store(out + row[:, None] * CO + co[None, :], tl.where(active, y, 0.0))


@triton.jit
def _weights_first(patches, index, step, width_max, d, g, stride, norms, SLOT: tl.constexpr, SLOTS: tl.constexpr,
                   BT: tl.constexpr):  # fmt: skip
    n = tl.program_id(0)
    t = tl.load(step)
    record = tl.load(index + t * width_max + n).to(tl.int64)
    k = tl.arange(0, 32)
    c = tl.arange(0, 32)
    acc = tl.zeros((32, 32), dtype=tl.float32)
    for start in range(0, 1024, BT):
        position = start + tl.arange(0, BT)
        x = tl.load(patches + (record * 1024 + position[:, None]) * 32 + k[None, :])
        e = tl.load(d + (n * 1024 + position)[:, None] * 32 + c[None, :])
        acc = tl.dot(tl.trans(e), x, acc)
    row = g + n.to(tl.int64) * stride
    flat = tl.where(k[None, :] < 27, c[:, None] * 27 + k[None, :], 864 + c[:, None])
    tl.store(row + flat, acc.to(tl.bfloat16), mask=(k[None, :] < 28) & (c[:, None] < 32))
    tl.store(norms + n * SLOTS + SLOT, tl.sum(tl.sum(acc * acc, 1), 0))


@triton.jit
def _weights(x, d, g, stride, OFFSET: tl.constexpr, norms, SLOT: tl.constexpr, SLOTS: tl.constexpr, S: tl.constexpr,
             CI: tl.constexpr, CO: tl.constexpr, BC: tl.constexpr, BT: tl.constexpr):  # fmt: skip
    """Gradient of one record for one row of the 3 × 3 taps and BC of the CO output channels."""
    n = tl.program_id(0)
    i = tl.program_id(1)
    block = tl.program_id(2)
    ci = tl.arange(0, CI)
    co = block * BC + tl.arange(0, BC)
    left = tl.zeros((BC, CI), dtype=tl.float32)
    middle = tl.zeros((BC, CI), dtype=tl.float32)
    right = tl.zeros((BC, CI), dtype=tl.float32)
    bias = tl.zeros((BT, BC), dtype=tl.float32)
    for start in range(0, S * S, BT):
        position = start + tl.arange(0, BT)
        h = position // S + i - 1
        v = position % S
        e = tl.load(d + (n * S * S + position)[:, None] * CO + co[None, :])
        bias += e.to(tl.float32)
        e = tl.trans(e)
        here = x + (n * S * S + h * S + v)[:, None] * CI + ci[None, :]
        inside = (h >= 0) & (h < S)
        left = tl.dot(e, tl.load(here - CI, mask=(inside & (v > 0))[:, None], other=0.0), left)
        middle = tl.dot(e, tl.load(here, mask=inside[:, None], other=0.0), middle)
        right = tl.dot(e, tl.load(here + CI, mask=(inside & (v < S - 1))[:, None], other=0.0), right)
    place = g + n.to(tl.int64) * stride + OFFSET + co[:, None] * (9 * CI) + i * (3 * CI) + ci[None, :]
    tl.store(place, left.to(tl.bfloat16))
    tl.store(place + CI, middle.to(tl.bfloat16))
    tl.store(place + 2 * CI, right.to(tl.bfloat16))
    total = tl.sum(tl.sum(left * left + middle * middle + right * right, 1), 0)
    if i == 0:
        summed = tl.sum(bias, 0)
        tl.store(g + n.to(tl.int64) * stride + OFFSET + CO * 9 * CI + co, summed.to(tl.bfloat16))
        total += tl.sum(summed * summed, 0)
    tl.store(norms + n * SLOTS + SLOT + block * 3 + i, total)


@triton.jit
def _factors(norms, counts, step, clip, factor, SLOTS: tl.constexpr, BN: tl.constexpr):
    """How much of each record's gradient enters the sum; nothing of the rows beyond the batch."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    s = tl.arange(0, SLOTS)
    squared = tl.sum(tl.load(norms + n[:, None] * SLOTS + s[None, :]), 1)
    size = tl.load(counts + tl.load(step))
    tl.store(factor + n, tl.where(n < size, tl.minimum(clip / (tl.sqrt(squared) + 1e-6), 1.0), 0.0))


@triton.jit
def _update(g, stride, factor, width, noise, theta, theta16, rate, step, P, BP: tl.constexpr, BN: tl.constexpr):
    """θ ← θ − rate · (Σ factor · gradient + noise of this step), with the rate divided by the expected batch size."""
    column = tl.program_id(0) * BP + tl.arange(0, BP)
    inside = column < P
    totals = tl.zeros((BN, BP), dtype=tl.float32)
    for start in range(0, width, BN):
        n = start + tl.arange(0, BN)
        f = tl.load(factor + n)
        rows = tl.load(g + n.to(tl.int64)[:, None] * stride + column[None, :], mask=inside[None, :], other=0.0)
        totals += rows.to(tl.float32) * f[:, None]
    total = tl.sum(totals, 0)
    t = tl.load(step).to(tl.int64)
    y = tl.load(noise + t * P + column, mask=inside, other=0.0)
    new = tl.load(theta + column, mask=inside, other=0.0) - tl.load(rate) * (total + y)
    tl.store(theta + column, new, mask=inside)
    tl.store(theta16 + column, new.to(tl.bfloat16), mask=inside)


def patches(images: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    """(n, 1024, 32): the 3 × 3 windows of the normalised images, a one, four zeros; bfloat16."""
    out = torch.zeros(len(images), 1024, 32, dtype=torch.bfloat16, device=images.device)
    out[:, :, 27] = 1.0
    for start in range(0, len(images), 5000):
        x = (images[start : start + 5000].float() / 255 - mean) / std
        x = torch.nn.functional.pad(x.permute(0, 2, 3, 1), (0, 0, 1, 1, 1, 1))
        for tap in range(9):
            i, j = divmod(tap, 3)
            out[start : start + 5000, :, 3 * tap : 3 * tap + 3] = x[:, i : i + 32, j : j + 32].reshape(len(x), 1024, 3)
    return out


class Step:
    """The buffers of one run, and its step on `width` records, of which the batch may be a part."""

    SLOTS = 64

    def __init__(
        self, data: torch.Tensor, labels: torch.Tensor, most: int, steps: int, clip: float, offsets: list[int]
    ):
        device = data.device
        make = lambda *shape, dtype=torch.bfloat16: torch.zeros(shape, dtype=dtype, device=device)  # noqa: E731
        self.data, self.labels, self.most, self.clip = data, labels, most, clip
        self.offsets, self.parameters = offsets, offsets[-1]
        self.stride = 256 * -(-self.parameters // 256)
        self.a = [make(most, 1024, 32), make(most, 256, 32), make(most, 256, 64), make(most, 64, 64)]
        self.a += [make(most, 64, 128), make(most, 64, 128)]
        self.code = {1: make(most, 256, 32, dtype=torch.int8), 3: make(most, 64, 64, dtype=torch.int8)}
        self.code[5] = make(most, 4, 128, dtype=torch.int8)
        self.d = [make(most, 1024, 32), make(most, 1024, 32), make(most, 256, 64), make(most, 256, 64)]
        self.d += [make(most, 64, 128), make(most, 64, 128)]
        self.feature, self.d_feature = make(most, 512), make(most, 512)
        self.g = make(most, self.stride)
        self.norms = make(most, self.SLOTS, dtype=torch.float32)
        self.factor = make(most, dtype=torch.float32)
        self.theta, self.theta16 = make(self.parameters, dtype=torch.float32), make(self.parameters)
        self.rate = make(1, dtype=torch.float32)
        self.step = make(1, dtype=torch.int32)
        self.index = make(steps, most, dtype=torch.int32)
        self.counts = make(steps, dtype=torch.int32)
        self.noise = make(steps, self.parameters, dtype=torch.float32)
        self.gradient, self.inverse = make(self.parameters, dtype=torch.float32), make(1, dtype=torch.float32)

    def forward(self, width: int, index: torch.Tensor, step: torch.Tensor) -> None:
        """Up to the features, for the records in a row of the index."""
        a, w = self.a, self.theta16
        block, warps, stages = SHAPES["first", 0]
        _first[(width * 1024 // block,)](
            self.data, index, step, self.most, w, a[0], BM=block, num_warps=warps,
            num_stages=stages,
        )  # fmt: skip
        for layer in range(1, 6):
            self.convolution(layer, width)
        _pool4[(width,)](a[5], self.feature, self.code[5])

    def convolution(self, layer: int, width: int) -> None:
        side, ci, co, after = LAYERS[layer - 1]
        block, warps, stages = SHAPES["forward", layer]
        o, a = self.offsets, self.a
        weight, bias = self.theta16[o[2 * layer] :], self.theta16[o[2 * layer + 1] :]
        how = {"num_warps": warps, "num_stages": stages}
        if after == "pool":
            grid = (width * side * side // 4 // block,)
            _conv_pool[grid](a[layer - 1], weight, bias, a[layer], self.code[layer], side, ci, co, BP=block, **how)
        else:
            _conv_relu[(width * side * side // block,)](
                a[layer - 1], weight, bias, a[layer], side, ci, co, BM=block, **how
            )

    def backward(self, width: int) -> None:
        _head[(width,)](
            self.feature, self.theta16[self.offsets[12] :], self.labels, self.index, self.step, self.most,
            self.d_feature, self.g, self.stride, self.offsets[12], self.norms, self.SLOTS,
        )  # fmt: skip
        _unpool4[(width,)](self.d_feature, self.code[5], self.d[5])
        for layer in (5, 4, 3, 2, 1):
            self.weights(layer, width)
            self.back(layer, width)
        block, warps, stages = SHAPES["weights", 0]
        _weights_first[(width,)](
            self.data, self.index, self.step, self.most, self.d[0], self.g, self.stride, self.norms, 1, self.SLOTS,
            BT=block, num_warps=warps, num_stages=stages,
        )  # fmt: skip

    def weights(self, layer: int, width: int) -> None:
        side, ci, co, _ = LAYERS[layer - 1]
        block, warps, stages, part = SHAPES["weights", layer]
        _weights[(width, 3, co // part)](
            self.a[layer - 1], self.d[layer], self.g, self.stride, self.offsets[2 * layer], self.norms, 12 * layer - 10,
            self.SLOTS, side, ci, co, BC=part, BT=block, num_warps=warps, num_stages=stages,
        )  # fmt: skip

    def back(self, layer: int, width: int) -> None:
        side, ci, co, _ = LAYERS[layer - 1]
        block, warps, stages = SHAPES["back", layer]
        pooled = layer - 1 in self.code
        _back[(width * side * side // block,)](
            self.d[layer], self.theta16[self.offsets[2 * layer] :], (self.code if pooled else self.a)[layer - 1],
            self.d[layer - 1], side, co, ci, BM=block, POOLED=pooled, num_warps=warps, num_stages=stages,
        )  # fmt: skip

    def finish(self, width: int, optimizer: Any = None) -> None:
        _factors[(width // 16,)](self.norms, self.counts, self.step, self.clip, self.factor, self.SLOTS, BN=16)
        theta, rate = self.theta, self.rate
        if optimizer is not None:  # a step from zero, of a rate that is −1 over the expected batch size: the gradient
            theta, rate = self.gradient.zero_(), self.inverse
        block, warps, stages, part = SHAPES["update", 0]
        _update[(triton.cdiv(self.parameters, block),)](
            self.g, self.stride, self.factor, width, self.noise, theta, self.theta16, rate, self.step,
            self.parameters, BP=block, BN=part, num_warps=warps, num_stages=stages,
        )  # fmt: skip
        if optimizer is not None:
            optimizer.update(self.theta, self.gradient, self.step)
            self.theta16.copy_(self.theta)
        self.step += 1

    def __call__(self, width: int, optimizer: Any = None) -> None:
        self.forward(width, self.index, self.step)
        self.backward(width)
        self.finish(width, optimizer)
