"""Which models Megatron-Core's layers can hold here, and how many processes can divide one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from strop.config import MegatronTrainerOptions
from strop.types import UserError

_FAMILIES = ("llama", "qwen2", "qwen3")
_ROTATIONS = ("default", "linear", "llama3")  # whose frequencies are the same for every length


@dataclass(frozen=True)
class Shape:
    """A model of Llama's kind, as Megatron-Core has one: norms before attention and a gated MLP, rotary positions.

    `num_groups`: heads of keys and values, each shared by some heads of queries.
    """

    num_layers: int
    width: int
    mlp_width: int
    num_heads: int
    num_groups: int
    head_size: int
    vocab_size: int
    norm_eps: float
    max_positions: int
    has_qkv_bias: bool
    norms_queries: bool
    is_tied: bool
    padding: int | None  # a token whose vector gets no gradient where it is read

    @classmethod
    def of(cls, model: Any) -> Shape:
        """The shape of a Hugging Face model, which may be without its weights.

        Raises:
            UserError: it is none that these layers compute.
        """
        settings, family = model.config.get_text_config(), model.config.model_type
        if family not in _FAMILIES:
            raise _refusal(model, f"it takes Llama, Qwen2 and Qwen3, dense ones, and not {family}")
        shape = cls(
            num_layers=settings.num_hidden_layers,
            width=settings.hidden_size,
            mlp_width=settings.intermediate_size,
            num_heads=settings.num_attention_heads,
            num_groups=settings.num_key_value_heads,
            head_size=getattr(settings, "head_dim", None) or settings.hidden_size // settings.num_attention_heads,
            vocab_size=model.get_input_embeddings().weight.shape[0],
            norm_eps=settings.rms_norm_eps,
            max_positions=settings.max_position_embeddings,
            has_qkv_bias=family == "qwen2",
            norms_queries=family == "qwen3",
            is_tied=model.get_output_embeddings().weight is model.get_input_embeddings().weight,
            padding=model.get_input_embeddings().padding_idx,
        )
        fault = shape._fault(model, settings)
        if fault:
            raise _refusal(model, fault)
        return shape

    def _fault(self, model: Any, settings: Any) -> str:
        layers = getattr(settings, "layer_types", None) or ()
        if "sliding_attention" in layers:
            return "its layers attend to a window of tokens alone"
        if settings.hidden_act != "silu":
            return f"its MLP has {settings.hidden_act}, not silu"
        kind = model.model.rotary_emb.rope_type
        if kind not in _ROTATIONS:
            return f"its rotary positions are of the kind {kind}, not {', '.join(_ROTATIONS)}"
        odd = sorted({name for name, _ in model.named_parameters()} ^ set(self.names()))
        return f"its weights are not those of its kind: {', '.join(odd[:3])}" if odd else ""

    def names(self) -> Iterator[str]:
        """The weights by Hugging Face's names, tied ones once."""
        yield "model.embed_tokens.weight"
        for layer in range(self.num_layers):
            yield from (f"model.layers.{layer}.{name}" for name in self.names_of_layer())
        yield "model.norm.weight"
        if not self.is_tied:
            yield "lm_head.weight"

    def names_of_layer(self) -> Iterator[str]:
        """Within a layer."""
        for part in "qkv":
            yield f"self_attn.{part}_proj.weight"
            if self.has_qkv_bias:
                yield f"self_attn.{part}_proj.bias"
        yield "self_attn.o_proj.weight"
        if self.norms_queries:
            yield from ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
        yield from (f"mlp.{part}_proj.weight" for part in ("gate", "up", "down"))
        yield from ("input_layernorm.weight", "post_attention_layernorm.weight")

    def check_divides(self, options: MegatronTrainerOptions) -> None:
        """Raises UserError where so many processes cannot divide it."""
        for option, numbers in (
            (
                "tensor_parallel",
                {
                    "num_attention_heads": self.num_heads,
                    "num_key_value_heads": self.num_groups,
                    "intermediate_size": self.mlp_width,
                },
            ),
            ("pipeline_parallel", {"num_hidden_layers": self.num_layers}),
        ):
            size = getattr(options, option)
            for name, number in numbers.items():
                if number % size:
                    raise UserError(f"trainer.{option} must divide {name} of the model, {number}, got {size}.")

    def padded_vocab_size(self, tensor_parallel: int) -> int:
        """Rows of the embedding, so many that processes divide them evenly; those beyond the vocabulary stay 0, unread."""
        return -(-self.vocab_size // tensor_parallel) * tensor_parallel


def _refusal(model: Any, reason: str) -> UserError:
    return UserError(f"trainer.kind must be torch for {type(model).__name__}, got megatron: {reason}.")
