"""Muon for the matrices, AdamW for everything else.

Muon: the momentum of each matrix, brought near the closest orthogonal matrix by Newton-Schulz
iterations (Jordan et al. 2024), is the step. Matrices of one shape go through them together.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from examples.demo_model.model import DemoModel

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5


def orthogonalised(matrices: Tensor) -> Tensor:
    """Singular values of [K, rows, columns] brought near 1. In bfloat16 on a GPU."""
    a, b, c = NEWTON_SCHULZ
    x = matrices.bfloat16() if matrices.is_cuda else matrices.float()
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.transpose(1, 2)
    x = x / (x.norm(dim=(1, 2), keepdim=True) * 1.01 + 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.transpose(1, 2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.transpose(1, 2) if tall else x


class Muon:
    """Steps matrices [rows, columns] and stacks of them [E, rows, columns].

    Args:
        params: what to step.
        momentum: of the gradients; Nesterov's.
        weight_decay: times the learning rate.
    """

    def __init__(
        self, params: Iterable[nn.Parameter], *, momentum: float = 0.95, weight_decay: float = 0.01
    ) -> None:
        groups: dict[tuple[int, int], list[nn.Parameter]] = defaultdict(list)
        for param in params:
            groups[param.shape[-2], param.shape[-1]].append(param)
        self._groups = list(groups.values())
        self._momentum, self._weight_decay = momentum, weight_decay
        self._buffers = [_stacked(group).zero_() for group in self._groups]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Use and drop the gradients."""
        for group, buffer in zip(self._groups, self._buffers, strict=True):
            grads = _stacked([param.grad for param in group])
            buffer.lerp_(grads, 1 - self._momentum)
            update = orthogonalised(grads.lerp_(buffer, self._momentum))
            rows, columns = update.shape[1:]
            update = update.float() * max(1.0, rows / columns) ** 0.5
            start = 0
            for param in group:
                count = param.numel() // (rows * columns)
                param.mul_(1 - lr * self._weight_decay)
                param.sub_(update[start : start + count].view(param.shape), alpha=lr)
                param.grad = None
                start += count

    def state_dict(self) -> list[Tensor]:
        """Momentum, in bfloat16 to be small."""
        return [buffer.bfloat16() for buffer in self._buffers]

    def load_state_dict(self, state: list[Tensor]) -> None:
        """Of the same parameters."""
        for buffer, saved in zip(self._buffers, state, strict=True):
            buffer.copy_(saved)


def _stacked(tensors: list[Any]) -> Tensor:
    """[K, rows, columns], new."""
    return torch.cat([t.detach().reshape(-1, *t.shape[-2:]).float() for t in tensors])


class Optimizers:
    """Everything that steps a `DemoModel`: its matrices, its small parts, its indexers.

    Args:
        model: on its device.
        muon_lr: matrices; adam_lr: embeddings, head, norms, routers; index_lr: indexers.
    """

    def __init__(
        self, model: DemoModel, *, muon_lr: float, adam_lr: float, index_lr: float
    ) -> None:
        index = {id(p) for p in model.index_parameters()}
        matrices, others = [], []
        for name, param in model.named_parameters():
            if id(param) in index:
                continue
            is_matrix = name.startswith("layers.") and param.dim() > 1 and ".gate.w" not in name
            (matrices if is_matrix else others).append(param)
        self._lrs = (muon_lr, adam_lr, index_lr)
        self.muon = Muon(matrices)
        fused = matrices[0].is_cuda
        self.adam = torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0, fused=fused)
        self.index = torch.optim.AdamW(
            model.index_parameters(), betas=(0.9, 0.98), weight_decay=0.0, fused=fused
        )

    def step(self, scale: float, *, main: bool, index: bool) -> None:
        """One step at `scale` times the learning rates, of the parts that have gradients."""
        muon_lr, adam_lr, index_lr = (scale * lr for lr in self._lrs)
        if main:
            self.muon.step(muon_lr)
            _step_adam(self.adam, adam_lr)
        if index:
            _step_adam(self.index, index_lr)

    def state_dict(self) -> dict[str, Any]:
        """Of all three, to be saved."""
        return {
            "muon": self.muon.state_dict(),
            "adam": self.adam.state_dict(),
            "index": self.index.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From `state_dict`."""
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])
        self.index.load_state_dict(state["index"])


def _step_adam(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
