"""float32 masters of parameters in a narrower type."""

from __future__ import annotations

import torch
from torch import Tensor


class MasterWeights:
    """What the optimizer moves: the trained parameters themselves, or float32 copies of those in a narrower type.

    In bfloat16 a step smaller than 1/512 of a weight rounds away, and reinforcement learning makes few larger ones. The
    masters add such steps up; the model's weights are the masters, rounded. A float32 parameter is its own master:
    no copy, no cost. A narrow one costs, per weight, 4 bytes of master, 4 of gradient (summed over micro-batches in
    float32) and 8 of moments beside its own 2 and the 2 of a micro-batch's gradient: 20 bytes, where float32 takes 16.

    Args:
        parameters: by name, tied ones once; from now on only `write_weights` may change the narrow ones.
    """

    def __init__(self, parameters: dict[str, Tensor]) -> None:
        self._pairs: list[tuple[Tensor, Tensor]] = []  # narrow parameter, its master
        self.by_name: dict[str, Tensor] = {}
        for name, parameter in parameters.items():
            self.by_name[name] = parameter
            if parameter.dtype in (torch.bfloat16, torch.float16):
                self.by_name[name] = parameter.detach().float().requires_grad_()
                self._pairs.append((parameter, self.by_name[name]))

    def take_gradients(self) -> None:
        """Add what a backward pass left at the narrow parameters to the masters' gradients, and free it."""
        for parameter, master in self._pairs:
            if parameter.grad is None:
                continue
            gradient = parameter.grad.float()
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            parameter.grad = None

    def zero_grad(self) -> None:
        """Free all gradients, also those of a backward pass that was broken off."""
        for tensor in (*self.by_name.values(), *(parameter for parameter, _ in self._pairs)):
            tensor.grad = None

    @torch.no_grad()
    def write_weights(self) -> None:
        """Set the narrow parameters to their masters, rounded."""
        for parameter, master in self._pairs:
            parameter.copy_(master)
