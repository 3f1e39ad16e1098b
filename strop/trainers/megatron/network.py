"""A model of Llama's kind made of Megatron-Core's layers."""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from strop.config import MegatronTrainerOptions
from strop.trainers.megatron.groups import Groups
from strop.trainers.megatron.shape import Shape


class CausalAttention(nn.Module):
    """Attention of Megatron-Core's tensors by torch's kernels: a token sees those before it and itself.

    Its arguments are those that Megatron-Core makes every core attention with.
    """

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """Args: query L x B x heads x size, key and value L x B x groups x size. Returns L x B x (heads size)."""
        shared = query.shape[2] // key.shape[2]
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        k, v = (tensor.repeat_interleave(shared, dim=1) if shared > 1 else tensor for tensor in (k, v))
        found = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return found.permute(2, 0, 1, 3).flatten(2).contiguous()


def build_network(
    shape: Shape, options: MegatronTrainerOptions, groups: Groups, *, dtype: torch.dtype, frequencies: Tensor
) -> Any:
    """The part of a model that this rank has, on the host; its weights are zeros. Called with tokens it returns, at the last
    stage, hidden states L x B x H after the last norm, and at others what the next one takes.

    Args:
        frequencies: of rotary positions, by Hugging Face's model.
    """
    from megatron.core.models.gpt import GPTModel

    config = _config(shape, options, dtype)
    network = GPTModel(
        config,
        _layers(shape, shape.num_layers // options.pipeline_parallel),
        shape.padded_vocab_size(options.tensor_parallel),
        shape.max_positions,
        pre_process=groups.is_first_stage,
        post_process=groups.is_last_stage,
        share_embeddings_and_output_weights=shape.is_tied,
        position_embedding_type="rope",
    )
    network._postprocess = MethodType(_hidden_states, network)  # the head is applied to chosen positions alone
    network.rotary_pos_emb.inv_freq = frequencies.detach().float().clone()
    if groups.is_first_stage and shape.padding is not None:
        network.embedding.word_embeddings.register_forward_hook(partial(_without_gradient, shape.padding))
    network.to(dtype)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
    return network


def _hidden_states(_: Any, hidden_states: Tensor, **__: Any) -> Tensor:
    return hidden_states


def _without_gradient(padding: int, _: nn.Module, given: tuple[Tensor, ...], found: Tensor) -> Tensor:
    """The vector of a padding token learns nothing where it is read, as in Hugging Face's models."""
    return torch.where((given[0] == padding)[..., None], found.detach(), found)


def _config(shape: Shape, options: MegatronTrainerOptions, dtype: torch.dtype) -> Any:
    from megatron.core.transformer import TransformerConfig

    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.width,
        ffn_hidden_size=shape.mlp_width,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_groups,
        kv_channels=shape.head_size,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        activation_func=nn.functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=shape.has_qkv_bias,
        qk_layernorm=shape.norms_queries,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        tensor_model_parallel_size=options.tensor_parallel,
        pipeline_model_parallel_size=options.pipeline_parallel,
        variable_seq_lengths=True,  # micro-batches have other lengths
        moe_token_dispatcher_type="alltoall",  # there are no experts, but lengths that vary ask for it
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=True,
        perform_initialization=False,
        calculate_per_token_loss=True,  # gradients are summed: token weights belong to the whole step
        deallocate_pipeline_outputs=False,
        cuda_graph_scope=[],  # its default warns that it is an old one
        **(recompute if options.activation_checkpointing else {}),
    )


def _layers(shape: Shape, number: int) -> Any:
    """Layers of Megatron-Core's own, without those of Transformer Engine."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    norm = WrappedTorchNorm if shape.norms_queries else IdentityOp
    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=CausalAttention,
        linear_proj=RowParallelLinear,
        q_layernorm=norm,
        k_layernorm=norm,
    )
    mlp = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    layer = TransformerLayerSubmodules(
        input_layernorm=WrappedTorchNorm,
        self_attention=ModuleSpec(SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention),
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=WrappedTorchNorm,
        mlp=ModuleSpec(MLP, params={"ffn_hidden_size": shape.mlp_width}, submodules=mlp),
        mlp_bda=get_bias_dropout_add,
    )
    return TransformerBlockSubmodules([ModuleSpec(TransformerLayer, submodules=layer)] * number, WrappedTorchNorm)
