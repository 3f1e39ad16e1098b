"""Random models of a few thousand parameters of many architectures: each from one table of small settings, of which a
config class is given those that it knows."""

import tiny_models
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCAB, POSITIONS, SPREAD, WINDOW = tiny_models.VOCAB, tiny_models.POSITIONS, tiny_models.SPREAD, tiny_models.WINDOW

_WIDTHS = ("hidden_size", "d_model", "n_embd", "lru_width", "word_embed_proj_dim")
_INNER_WIDTHS = ("intermediate_size", "ffn_dim", "n_inner", "dff")
_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = (
    "num_attention_heads",
    "n_head",
    "n_heads",
    "num_heads",
    "attention_heads",
    "num_experts",
    "num_local_experts",
)
_LIMITS = ("max_position_embeddings", "n_positions", "max_seq_len")
_WINDOWS = ("sliding_window", "window_size", "attention_window_size")
_STATES = ("state_size", "time_step_rank", "mamba_d_state", "mamba_dt_rank", "mamba_n_heads", "mamba_num_heads")
_OTHERS = {
    "vocab_size": VOCAB,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 4,
    "rotary_dim": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
    "chunk_size": 8,
    "n_groups": 1,
    "initializer_range": SPREAD,
    "init_std": SPREAD,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_SETTINGS = (
    dict.fromkeys(_WIDTHS, 16)
    | dict.fromkeys(_INNER_WIDTHS, 24)
    | dict.fromkeys(_DEPTHS, 2)
    | dict.fromkeys(_HEADS, 4)
    | dict.fromkeys(_LIMITS, POSITIONS)
    | dict.fromkeys(_WINDOWS, WINDOW)
    | dict.fromkeys(_STATES, 4)
    | _OTHERS
)

_PLAIN = (
    "llama qwen2 qwen3 qwen3_moe mixtral gemma gemma2 gemma3_text phi phi3 gpt2 gpt_neox gptj opt bloom falcon mpt mamba",
    "olmo olmo2 stablelm starcoder2 granite cohere cohere2 glm glm4 smollm3 codegen xglm bitnet nemotron minimax gpt_oss",
    "gpt_bigcode biogpt openai-gpt persimmon",
)

# model type and what it needs besides
ARCHITECTURES = {name: (name, {}) for line in _PLAIN for name in line.split()} | {
    "bert": ("bert", {}),  # sees later tokens
    "falcon_alibi": ("falcon", {"alibi": True}),
    "gpt_neo": ("gpt_neo", {"attention_types": [[["global", "local"], 1]]}),
    "mamba2": ("mamba2", {"head_dim": 8}),
    "recurrent_gemma": ("recurrent_gemma", {"num_hidden_layers": 3}),
    "deepseek_v3": ("deepseek_v3", {"num_key_value_heads": 4, "head_dim": 4}),
    "jamba": ("jamba", {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False}),
    "bamba": ("bamba", {"attn_layer_indices": [1]}),
    "falcon_h1": ("falcon_h1", {"mamba_d_ssm": 32}),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"]}),
    "xlstm": ("xlstm", {"hidden_size": 32, "embedding_dim": 32}),
}


def build(name, **changes):
    """A model in float32, its vectors (norms, biases) moved off 1 and 0."""
    kind, special = ARCHITECTURES[name]
    config_class = CONFIG_MAPPING[kind]
    known = config_class().to_dict().keys() - config_class.attribute_map.keys()
    config = config_class(**{n: v for n, v in _SETTINGS.items() if n in known} | special | changes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 2:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    return model
