"""The layers of models of Llama's shape, in fewer passes over memory than transformers makes: their products are as before, and
what stands between them (norms, rotations, gated activations) keeps less for the backward pass and makes fewer copies."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu

from strop.products import is_plain

_MODELS = ("Llama", "Mistral", "Qwen2", "Qwen3")


class RMSNorm(torch.autograd.Function):
    """x weight / sqrt(mean x^2 + eps) of x [..., H]; keeps x and one number a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (x, weight, scale) = grads, ctx.saved_tensors
        # With s = scale and g = grad: d weight = sum of s g x over rows, d x = s g weight - x s^3 mean(g weight x)
        both = grad * x
        rows = both.reshape(-1, x.shape[-1])
        along = torch.mv(rows, weight).view_as(scale).mul_(scale.pow(3)).div_(x.shape[-1])
        of_weight = torch.mv(rows.T, scale.reshape(-1))
        return torch.mul(grad, weight, out=both).mul_(scale).addcmul_(x, along, value=-1), of_weight, None


class GatedSilu(torch.autograd.Function):
    """silu(gate) up, elementwise; keeps both."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (grad,), (gate, up) = grads, ctx.saved_tensors
        of_gate = grad * up
        torch.ops.aten.silu_backward.grad_input(of_gate, gate, grad_input=of_gate)
        return of_gate, silu(gate).mul_(grad)


class Rotation(torch.autograd.Function):
    """x cos + (the halves of x exchanged, the first one negated) sin, of x [B, L, heads, D] and angles [B, L, 1, D]; keeps
    the angles."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, *sin.chunk(2, -1), sign=-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (cos, sin) = grads, ctx.saved_tensors
        first, second = sin.chunk(2, -1)
        return _rotated(grad, cos, second, first, sign=1), None, None


def _rotated(x: Tensor, cos: Tensor, to_first: Tensor, to_second: Tensor, *, sign: int) -> Tensor:
    """x cos, whose halves get each other's times their factor, the first with the sign and the second with the opposite one."""
    found, (first, second) = x * cos, x.chunk(2, -1)
    into_first, into_second = found.chunk(2, -1)
    into_first.addcmul_(second, to_first, value=sign)
    into_second.addcmul_(first, to_second, value=-sign)
    return found


def use_lean_layers(model: Any) -> None:
    """Norms, gated MLPs and attention of a Llama, Mistral, Qwen2 or Qwen3 compute by the functions above wherever they are
    given plain float32 tensors on the CPU; weights and modules stay the same objects.

    Whether their results are those of before is seen on a few tokens; where they are not, the model is left as it was.
    """
    found = {m: lean for m in model.modules() if (lean := _lean(type(m))) is not None}
    if not found:
        return
    before = _hidden(model)
    for module, lean in found.items():
        module.__class__ = lean
    try:
        is_same = torch.allclose(_hidden(model), before, rtol=1e-4, atol=1e-4 * float(before.abs().max()))
    except Exception:  # noqa: BLE001 - a library that has changed raises whatever it likes
        is_same = False
    if not is_same:
        for module, lean in found.items():
            module.__class__ = lean.__base__


@torch.no_grad()
def _hidden(model: Any) -> Tensor:
    ids = torch.arange(4)[None] % model.config.get_text_config().vocab_size
    return model.base_model(input_ids=ids, use_cache=False)[0]


@cache
def _lean(kind: type) -> type | None:
    """A class of transformers with another forward pass; None for one that has none."""
    forwards = {"RMSNorm": _norm, "MLP": _mlp, "Attention": _attention}
    forward = {f"{model}{layer}": f for model in _MODELS for layer, f in forwards.items()}.get(kind.__name__)
    if forward is None or not kind.__module__.startswith("transformers.models."):
        return None
    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__, "__reduce_ex__": _reduced})


def _reduced(self: Any, protocol: int) -> Any:
    """A process that is sent such a module makes its class anew: no module of Python holds it under its name."""
    return _empty, (self.__class__.__base__,), self.__dict__


def _empty(kind: type) -> Any:
    lean = _lean(kind)
    assert lean is not None
    return lean.__new__(lean)


def _norm(self: Any, hidden_states: Tensor) -> Tensor:
    if not is_plain(hidden_states, self.weight):
        return self.__class__.__base__.forward(self, hidden_states)
    return RMSNorm.apply(hidden_states, self.weight, self.variance_epsilon)


def _mlp(self: Any, x: Tensor) -> Tensor:
    if not is_plain(x) or self.config.hidden_act != "silu":
        return self.__class__.__base__.forward(self, x)
    return self.down_proj(GatedSilu.apply(self.gate_proj(x), self.up_proj(x)))


def _attention(
    self: Any, hidden_states: Tensor, position_embeddings: Any = None, attention_mask: Any = None, **more: Any
) -> Any:
    if not _is_usual(self, more) or not is_plain(hidden_states, *position_embeddings):
        given = (hidden_states, position_embeddings, attention_mask)
        return self.__class__.__base__.forward(self, *given, **more)
    from transformers import AttentionInterface

    cos, sin = (angles[:, :, None] for angles in position_embeddings)
    queries, keys, values = (
        project(hidden_states).view(*hidden_states.shape[:-1], -1, self.head_dim)
        for project in (self.q_proj, self.k_proj, self.v_proj)
    )
    if hasattr(self, "q_norm"):
        queries, keys = self.q_norm(queries), self.k_norm(keys)
    heads = (x.transpose(1, 2) for x in (Rotation.apply(queries, cos, sin), Rotation.apply(keys, cos, sin), values))
    attend = AttentionInterface()["sdpa"]
    found, weights = attend(self, *heads, attention_mask, dropout=0.0, scaling=self.scaling, **more)
    return self.o_proj(found.flatten(2)), weights


def _is_usual(attention: Any, more: dict[str, Any]) -> bool:
    """No cache and no dropout; windows are in the mask."""
    has_cache = any(more.get(name) is not None for name in ("cache", "past_key_values"))
    drops = attention.training and attention.attention_dropout
    return attention.config._attn_implementation == "sdpa" and not (has_cache or drops)
