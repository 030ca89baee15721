"""One step on one process as zerocast/backends/README.md has it, in numpy: what any number of ranks must give, to the bit.

Knows no shard, bucket, plan or collective. Every line of the update is one f32 operation an element; numpy fuses none.
"""

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests import casts
from tests.formats import model
from tests.optim.probe import PLAIN, Spec
from zerocast import get_format
from zerocast.backends.reference.adam import dequantize_moments, quantize_moments

F32 = NDArray[np.float32]
f32 = np.float32


class Undistributed:
    """Masters, moments, step and delayed scales of some parameters; the bytes of their weights.

    Moments are f32 values that `moment_dtype` can hold.
    """

    def __init__(self, specs: Iterable[Spec], moment_dtype: torch.dtype | Literal["8bit"] = torch.float32) -> None:
        self._moment_dtype = moment_dtype
        self.specs: dict[str, Spec] = {}
        self.master: dict[str, F32] = {}
        self.exp_avg: dict[str, F32] = {}
        self.exp_avg_sq: dict[str, F32] = {}
        self.step_count = 0
        # The steps that were taken before a parameter was added.
        self._before: dict[str, int] = {}
        self.skipped = 0
        self.norm = 0.0
        self.scale: dict[str, np.float32] = {}
        self.history: dict[str, F32] = {}
        self.bytes: dict[str, casts.Bytes] = {}
        self.add(specs)

    def add(self, specs: Iterable[Spec]) -> None:
        """Train these parameters, too, from here on."""
        for spec in specs:
            name = spec.name
            self.specs[name] = spec
            self.master[name] = spec.initial().numpy()
            self.exp_avg[name], self.exp_avg_sq[name] = (np.zeros_like(self.master[name]) for _ in range(2))
            self._before[name] = self.step_count
            if spec.fmt.startswith("fp8_delayed"):
                self.scale[name], self.history[name] = f32(1), np.zeros(get_format(spec.fmt).amax_history_len, f32)
                self._cast(name)  # seeds the scale
            self._cast(name)

    def steps_of(self, name: str) -> int:
        """Return the steps that a parameter has taken."""
        return self.step_count - self._before[name]

    def step(
        self,
        gradients: Mapping[str, Sequence[F32]],
        options: Sequence[Mapping[str, Any]],
        max_norm: float | None = None,
    ) -> None:
        """Make an update. `gradients[name]` holds each round's mean over the ranks, f32; `options` the
        hyperparameters by group.
        """
        total = {name: _sum(rounds) for name, rounds in gradients.items()}
        with np.errstate(over="ignore", invalid="ignore"):
            self.norm = math.sqrt(sum(float(np.square(g.astype(np.float64)).sum()) for g in total.values()))
        if not math.isfinite(self.norm):
            self.skipped += 1
            return
        clip = f32(1)
        if max_norm is not None:
            clip = min(f32(1), f32(max_norm) / (f32(self.norm) + f32(1e-6)))
        self.step_count += 1
        for name, spec in self.specs.items():
            self._adam(name, total[name] * clip, **options[spec.group])
            self._cast(name)

    def _adam(self, name: str, g: F32, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
        (beta1, beta2), t = betas, self.steps_of(name)
        c1, c2 = 1 - beta1**t, 1 - beta2**t
        p, m, v = self.master[name], self.exp_avg[name], self.exp_avg_sq[name]
        p = p * f32(1 - lr * weight_decay)
        m = f32(beta1) * m + f32(1 - beta1) * g
        v = f32(beta2) * v + (f32(1 - beta2) * g) * g
        p = p - f32(lr / c1) * (m / (np.sqrt(v) / f32(math.sqrt(c2)) + f32(eps)))
        if isinstance(self._moment_dtype, torch.dtype):
            m, v = (torch.from_numpy(np.asarray(x)).to(self._moment_dtype).float().numpy() for x in (m, v))
        else:
            m, v = self._in_8_bits(name, np.asarray(m), np.asarray(v))
        self.master[name], self.exp_avg[name], self.exp_avg_sq[name] = map(np.asarray, (p, m, v))

    def _in_8_bits(self, name: str, m: F32, v: F32) -> tuple[F32, F32]:
        """Return the moments of a whole weight, rounded to 8 bits."""
        columns = m.shape[-1] if m.ndim else 1
        whole = [0, 0, m.size, 0, 0, columns, 0, m.size, -1, -1, zlib.crc32(name.encode())]
        codes = torch.zeros(m.size, dtype=torch.int8), torch.zeros(m.size, dtype=torch.uint8)
        scales = torch.zeros(2, m.size)
        fresh_m, fresh_v = torch.from_numpy(m.reshape(-1).copy()), torch.from_numpy(v.reshape(-1).copy())
        none = torch.zeros(2, 0)
        quantize_moments(fresh_m, fresh_v, *codes, scales, whole, self.steps_of(name), none, finishes=False)
        kept_m, kept_v = dequantize_moments(*codes, scales, whole)
        return kept_m.view(m.shape).numpy(), kept_v.view(v.shape).numpy()

    def state(self, name: str) -> dict[str, F32]:
        """Return the moments of a parameter, by the names of torch.optim."""
        return {"exp_avg": self.exp_avg[name], "exp_avg_sq": self.exp_avg_sq[name]}

    def _cast(self, name: str) -> None:
        spec, master = self.specs[name], torch.from_numpy(self.master[name].copy()).view(self.specs[name].shape)
        if spec.fmt == PLAIN:
            self.bytes[name] = {"rowwise_data": casts.raw(master.to(spec.dtype))}
            return
        self.bytes[name] = casts.unsharded(spec.fmt, master, spec.dtype, float(self.scale.get(name, 1.0)))
        if name in self.scale:
            fmt = get_format(spec.fmt)
            assert fmt.element
            amax = float(self.bytes[name]["amax"].view(f32)[0])
            self.history[name], self.scale[name] = model.delayed_update(
                self.history[name], amax, float(self.scale[name]), fmt.element.max, fmt.margin, fmt.amax_compute_algo
            )
            self.bytes[name] |= {"scale": self.scale[name].reshape(1).view(np.uint8)}
            self.bytes[name] |= {"amax_history": self.history[name].view(np.uint8)}


class UndistributedMuon(Undistributed):
    """An Undistributed whose groups with use_muon are stepped by torch.optim.Muon on `device`. Each matrix, or
    each of a stack, has its own.
    """

    def __init__(
        self, specs: Iterable[Spec], moment_dtype: torch.dtype | Literal["8bit"] = torch.float32, device: str = "cpu"
    ) -> None:
        super().__init__(specs, moment_dtype)
        self._device = device
        # The numbers of the groups that say use_muon.
        self.muon_groups = {0}
        self._muons: dict[str, list[torch.optim.Muon]] = {}
        self._momentum: dict[str, F32] = {}

    def state(self, name: str) -> dict[str, F32]:
        """Return the momentum of Muon's parameters, which starts from zero."""
        spec = self.specs[name]
        if spec.group not in self.muon_groups:
            return super().state(name)
        return {"momentum_buffer": self._momentum.get(name, np.zeros(spec.shape, f32))}

    def _adam(self, name: str, g: F32, lr: float, use_muon: bool, **options: Any) -> None:
        if not use_muon:
            super()._adam(name, g, lr, **options)
            return
        shape = self.specs[name].shape
        masters = torch.from_numpy(self.master[name].copy()).view(-1, *shape[-2:]).unbind()
        if name not in self._muons:
            self._muons[name] = [
                torch.optim.Muon([torch.nn.Parameter(m.to(self._device))], lr, **options) for m in masters
            ]
        muons = self._muons[name]
        for muon, part in zip(muons, torch.from_numpy(np.ascontiguousarray(g)).view(-1, *shape[-2:]), strict=True):
            (group,) = muon.param_groups
            group["lr"], group["params"][0].grad = lr, part.to(self._device)
            muon.step()
        stepped = [muon.param_groups[0]["params"][0] for muon in muons]
        momentum = [muon.state[p]["momentum_buffer"] for muon, p in zip(muons, stepped, strict=True)]
        self.master[name] = torch.stack([p.detach() for p in stepped]).view(shape).cpu().numpy()
        self._momentum[name] = torch.stack(momentum).view(shape).cpu().numpy()
        if self._moment_dtype == "8bit":
            # The second moment is not looked at.
            self._momentum[name], _ = self._in_8_bits(name, self._momentum[name], np.ones(shape, f32))
            kept = torch.from_numpy(self._momentum[name]).view(-1, *shape[-2:])
            for buffer, part in zip(momentum, kept, strict=True):
                buffer.copy_(part)


def mean(by_rank: Sequence[Tensor | None], like: Spec) -> F32:
    """Return the average over the ranks, added in rank order in f32. A missing gradient counts as zero."""
    parts = [np.zeros(like.shape, f32) if g is None else g.float().numpy() for g in by_rank]
    return _sum(parts) / f32(len(parts))


def _sum(parts: Sequence[F32]) -> F32:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
