"""Small models that do what a shortcut gets wrong most easily, as workloads: ``traps.py:branches`` and so on.

Each is legal PyTorch and passes the plain engine's demands (repeatable, leaves parameters and inputs as they were). Either
an engine follows it exactly, or it notices and runs plainly; both are right.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from unsilent.workloads.base import Workload

TRAPS: dict[str, Callable[[], Workload]] = {}


def trap(**options: Any) -> Callable[[type[nn.Module]], Callable[[], Workload]]:
    """Make a module class a workload of its name in small letters, with batches of several sizes and seeded weights."""

    def wrap(kind: type[nn.Module]) -> Callable[[], Workload]:
        def make() -> Workload:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(8)
                model = kind().eval()
            batches = [torch.randn(n, 12, generator=torch.Generator().manual_seed(n)) for n in (5, 3)]
            settings = {"judge": "tolerance", "name": kind.__name__.lower(), **options}
            return Workload(model, batches, **settings)

        TRAPS[kind.__name__.lower()] = globals()[kind.__name__.lower()] = make
        return make

    return wrap


class Two(nn.Module):
    """Two linear layers, for the traps to use."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 16)
        self.last = nn.Linear(16, 6)


@trap()
class Branches(Two):
    """Python takes a way that depends on values: ``bool``, ``item``, ``tolist``, ``numpy``, a shape from ``nonzero``."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if h.mean() > 0.05:
            h = h * 2
        h = h * (1 + int(h.argmax()) % 3)
        for value in h[0].tolist():
            if value > 3:
                h = h + 0.25
        if np.isfinite(h.numpy()).all():
            h = h - 0.125
        rows = (h.abs().sum(1) > 20).nonzero()
        return self.last(h) * (1 + rows.shape[0])


@trap()
class Raises(Two):
    """Raises on large values, in Python and inside of an operation."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if float(h.abs().max()) > 50:
            raise ValueError(f"activation of {float(h.abs().max()):g}")
        picked = torch.nn.functional.one_hot((h.mean(1) * 0.5).long().abs(), 4)
        return self.last(h) + picked.sum(1, keepdim=True)


@trap()
class Swallows(Two):
    """Catches the exception of an operation and goes another way."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        try:
            h = h + torch.linalg.cholesky(h.T @ h + torch.eye(16) * 0.1)[0]
        except RuntimeError:
            h = h * 0.5
        return self.last(h)


@trap()
class InPlace(Two):
    """Views written into in place, results in ``out=``, memory used twice."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        left, right = h.chunk(2, 1)
        left.mul_(right)
        h[:, 3:5] = h[:, 5:7]
        h.t()[2].add_(1).relu_()
        h[h > 0.5] -= 0.5
        out = torch.empty(len(x), 6)
        torch.mm(h, self.last.weight.t(), out=out)
        spare = torch.empty_like(h)
        spare.copy_(h).sigmoid_()
        spare[0].zero_()
        out[:, :3].add_(spare[:, 1:4])
        return out.add_(self.last.bias)


@trap()
class Scratch(Two):
    """A buffer is scratch memory: written and read in the run, zero again at its end."""

    pad: Tensor
    big: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("pad", torch.zeros(8, 16))
        self.kept = torch.zeros(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        n = len(x)
        self.pad[:n].add_(self.first(x))
        self.kept[:n].copy_(self.pad[:n] * 2)
        h = self.kept[:n].tanh() + self.pad.sum()
        self.pad.zero_()
        return self.last(h)


@trap()
class Shares(Two):
    """Outputs that share memory with each other, with an input, with a parameter; numbers and None among them."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = self.last(self.first(x).relu())
        return {
            "logits": h,
            "again": h,
            "part": (h[:, 1:4], h.t()),
            "input": x[:, 2:],
            "weight": self.last.weight[:, 0],
            "number": float(h.sum()),
            "count": int((h > 0).sum()),
            "nothing": None,
            "numpy": h.detach().numpy()[:, 0].copy(),
        }


@trap()
class Draws(Two):
    """Draws random numbers, some of them only as values have it."""

    def forward(self, x: Tensor) -> Tensor:
        h = functional.dropout(self.first(x), 0.3, training=True)
        h = h + torch.randn_like(h) * 0.1
        if h.sum() > 0:
            h = h + torch.rand(16)
        mask = torch.bernoulli(h.sigmoid().nan_to_num(0.5))
        return self.last(h * mask) + torch.rand(6)


@trap()
class Hidden(Two):
    """Reads a parameter through numpy memory that was taken long before: no operation shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = self.first.weight.detach().numpy()

    def forward(self, x: Tensor) -> Tensor:
        # Summed in a fixed order and copied: BLAS and the kernels of torch look at how memory happens to be aligned.
        product = (x.numpy()[:, None, :] * self.seen).sum(-1, dtype=np.float64).astype(np.float32)
        h = torch.from_numpy(product).clone() + self.first.bias
        return self.last(h)


@trap()
class Detached(Two):
    """Uses a parameter's memory under another tensor, ``data`` and a view made long before."""

    def __init__(self) -> None:
        super().__init__()
        self.half = [self.first.weight.detach()[:8], self.first.weight.data[8:]]

    def forward(self, x: Tensor) -> Tensor:
        h = torch.cat([x @ w.t() for w in self.half], 1) + self.first.bias.data
        return self.last(h.relu())


@trap()
class Gradients(Two):
    """Takes a gradient inside of the evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            y = x.clone().requires_grad_()
            energy = self.last(self.first(y).tanh()).square().sum()
            (slope,) = torch.autograd.grad(energy, y)
        return self.last(self.first(x - 0.1 * slope))


class Doubling(torch.autograd.Function):
    """A custom function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.mul(2).add_(x.abs().amax())


@trap()
class Wrapped(Two):
    """Custom function, checkpoint, scripted module, ``vmap``, ``functional_call``, inference mode, autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16) * 1.5)

    def forward(self, x: Tensor) -> Tensor:
        h = Doubling.apply(self.first(x))
        h = torch.utils.checkpoint.checkpoint(lambda t: t * self.scale, h, use_reentrant=False)
        h = torch.vmap(lambda row: row * row.sum())(h)
        with torch.inference_mode():
            g = h.tanh()
        with torch.autocast("cpu", torch.bfloat16):
            h = self.last(g.clone())
        swapped = {"weight": self.last.weight * 2, "bias": self.last.bias}
        return h.float() + torch.func.functional_call(self.last, swapped, (g,))


@trap()
class Fused(nn.Module):
    """Operations that fuse many: recurrent layers, the encoder's fast path, embedding bags, batch norm, attention."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 8, num_layers=2, bidirectional=True, batch_first=True)
        self.gru = nn.GRU(16, 8, batch_first=True)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.bag = nn.EmbeddingBag(9, 8, mode="max")
        self.norm = nn.BatchNorm1d(3, affine=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.lstm(x.reshape(len(x), 3, 4))
        h, last = self.gru(h)
        h = self.encoder(self.norm(h))
        h, weights = self.attention(h, h, h)
        bag = self.bag((x[:, :4] * 3).long().abs() % 9)
        return torch.cat([h.mean(1), last[0], bag, weights.flatten(1)], 1)


@trap()
class Nested(nn.Module):
    """The encoder's fast path with padding, which goes through nested tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2)
        self.last = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.tensor([2, 3, 2, 3, 3])[: len(x)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # nested tensors are a prototype
            h = self.encoder(x.reshape(len(x), 3, 4), src_key_padding_mask=torch.arange(3).ge(lengths[:, None]))
        return self.last(h.sum(1))


@trap()
class Sparse(Two):
    """A sparse tensor on the way."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.sparse.mm((x * (x > 0)).to_sparse(), self.first.weight.t()) + self.first.bias)


@trap()
class Kinds(nn.Module):
    """Many dtypes and layouts: complex, integer, bool, half, double, channels last, expanded, strided, empty."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Parameter(torch.randn(12, 8).half())
        self.wide = nn.Parameter(torch.randn(8, dtype=torch.float64))
        self.turned = nn.Parameter(torch.randn(8, 6).t())
        self.strided = nn.Parameter(torch.randn(12)[::2])
        self.register_buffer("whole", torch.randint(1, 5, (6,)))
        self.register_buffer("table", torch.randint(0, 12, (4,)))
        self.conv = nn.Conv2d(1, 4, 3, padding=1, groups=1).to(memory_format=torch.channels_last)
        self.deep = nn.Conv1d(4, 4, 3, groups=4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = (x.half() @ self.narrow).double() * self.wide
        h = h.float() @ self.turned.t()[:, :6] + self.strided
        f = torch.fft.rfft(x).abs() + torch.view_as_real(torch.fft.fft(x))[..., 0][:, :7]
        image = x.reshape(len(x), 1, 3, 4).contiguous(memory_format=torch.channels_last)
        c = self.deep(self.conv(image).flatten(2))
        counted = (h > 0) & (h < self.whole)
        taken = x.index_select(1, self.table) + x[:, self.table]
        e = self.strided.expand(len(x), 6) + torch.empty(len(x), 0).sum()
        return h, f, c, counted, counted.sum(1), taken, e


@trap()
class Sorted(Two):
    """Operations with several results, shapes or order that depend on values."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.first(x)
        values, places = h.sort(dim=1, stable=True)
        top, which = h.topk(3)
        found, back, counts = torch.unique((h * 2).round(), return_inverse=True, return_counts=True)
        kept = h.masked_select(h > 0)
        scattered = torch.zeros(16).scatter_add(0, places.flatten(), values.flatten())
        spread = torch.zeros(len(x), 16).index_put((torch.arange(len(x)), which[:, 0]), top[:, 0], accumulate=True)
        u, s, _ = torch.linalg.svd(h.nan_to_num(0, 1, -1).clamp(-9, 9), full_matrices=False)
        longest = functional.pad(kept[:20], (0, max(0, 20 - kept.numel())))
        return self.last(values), found, back, counts, kept, scattered, spread, s, u.abs(), longest


@trap()
class Zeros(Two):
    """Minus zero and the payload of a NaN decide what comes out."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).relu() * 0.0 * self.last.weight[0]
        signs = torch.copysign(torch.ones(()), h)
        bits = self.last(self.first(x)).view(torch.int32) >> 3
        return torch.cat([signs, (bits & 7).float()], 1)


@trap()
class Remembers(Two):
    """Keeps a value of this run under a module attribute, and weights derived from a parameter made anew at each call."""

    def forward(self, x: Tensor) -> Tensor:
        self.normed = functional.normalize(self.first.weight, dim=1)
        self.memory = {"h": x @ self.normed.t()}
        self.memory["h"] += self.first.bias
        h = self.memory.pop("h")
        del self.normed
        return self.last(h)


@trap()
class Swaps(Two):
    """Memory that is resized, exchanged or made by Python: ``set_``, ``resize_``, ``data``, ``torch.tensor(list)``."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        g = torch.empty(0)
        g.set_(h)
        g.mul_(1.5)
        grown = torch.empty(2).resize_(len(x), 16).copy_(h)
        other = torch.zeros(1)
        other.data = grown * 2
        made = torch.tensor([[float(v) for v in row] for row in h.tolist()])
        return self.last(other + made + torch.from_numpy(g.numpy()))


@trap()
class Shallow(Two):
    """A module called several times, with hooks and parametrised weights, children called out of order."""

    def __init__(self) -> None:
        super().__init__()
        self.mid = torch.nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
        self.spectral = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16))
        self.mid.register_forward_hook(lambda module, args, out: out + 0.5)
        self.first.register_forward_pre_hook(lambda module, args: (args[0] * 1.25,))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for _ in range(3):
            h = self.spectral(self.mid(h)).relu()
        return self.last(self.first.forward(x) + h)
