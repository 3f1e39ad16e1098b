"""Language models small enough to build inside a test: random weights, a few thousand parameters, no files."""

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.modeling_outputs import CausalLMOutput

VOCAB, POSITIONS = 37, 64
# A model with weights this large prefers some tokens by nats: an error in attention moves log-probabilities visibly.
SPREAD = 0.3
WINDOW = 4  # of the sliding layers: shorter than the sequences of the tests

_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,  # grouped queries: two heads of queries share one of keys
    "max_position_embeddings": POSITIONS,
    "initializer_range": SPREAD,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}


def _built(model_class, config, seed):
    """The model with every vector (norm, bias) moved off its 1 or 0, so that a forgotten one shows."""
    torch.manual_seed(seed)
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 2:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    return model


def llama(seed=0, **changes):
    return _built(LlamaForCausalLM, LlamaConfig(**_SHAPE | changes), seed)


def tied_llama(seed=0):
    return llama(seed, tie_word_embeddings=True)


def qwen2(seed=0):
    """Has biases on queries, keys and values."""
    return _built(Qwen2ForCausalLM, Qwen2Config(**_SHAPE), seed)


def qwen3(seed=0):
    """Norms queries and keys."""
    return _built(Qwen3ForCausalLM, Qwen3Config(**_SHAPE, head_dim=4), seed)


def gpt2(seed=0):
    """Learned positions, and a head tied to the embedding."""
    config = GPT2Config(
        vocab_size=VOCAB,
        n_embd=16,
        n_layer=2,
        n_head=4,
        n_positions=POSITIONS,
        initializer_range=SPREAD,
        bos_token_id=None,
        eos_token_id=None,
    )
    return _built(GPT2LMHeadModel, config, seed)


def sliding_mistral(seed=0):
    """Every layer sees the last WINDOW tokens only: a cache of another kind than the slot decoder's."""
    return _built(MistralForCausalLM, MistralConfig(**_SHAPE, sliding_window=WINDOW), seed)


def gemma2(seed=0, *, softcap=2.0):
    """Half of the layers slide, and the logits pass through softcap * tanh(logits / softcap): no plain head."""
    config = Gemma2Config(
        **_SHAPE, head_dim=4, sliding_window=WINDOW, final_logit_softcapping=softcap, query_pre_attn_scalar=4
    )
    return _built(Gemma2ForCausalLM, config, seed)


def phi(seed=0):
    """Its head has a bias, and so has every other layer."""
    return _built(PhiForCausalLM, PhiConfig(**_SHAPE, partial_rotary_factor=0.5), seed)


def opt(seed=0):
    """Does not notice that positions restart: packed, a sequence sees the one before it."""
    config = OPTConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        word_embed_proj_dim=16,
        ffn_dim=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=POSITIONS,
        init_std=SPREAD,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    return _built(OPTForCausalLM, config, seed)


BUILDERS = {
    "llama": llama,
    "tied_llama": tied_llama,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "gpt2": gpt2,
    "sliding_mistral": sliding_mistral,
    "gemma2": gemma2,
    "phi": phi,
}
FULL_ATTENTION = ("llama", "tied_llama", "qwen2", "qwen3", "gpt2", "phi")
PLAIN_HEAD = ("llama", "tied_llama", "qwen2", "qwen3", "gpt2", "sliding_mistral", "phi")


class BigramConfig(PretrainedConfig):
    model_type = "bigram"

    def __init__(self, vocab_size=3, max_position_embeddings=POSITIONS, **rest):
        super().__init__(**rest)
        self.vocab_size, self.max_position_embeddings = vocab_size, max_position_embeddings


class Bigram(PreTrainedModel):
    """p(next | last) is a table: row i of `table` holds the log-probabilities of what follows token i."""

    config_class = BigramConfig

    def __init__(self, config):
        super().__init__(config)
        self.table = torch.nn.Parameter(torch.zeros(config.vocab_size, config.vocab_size))
        self.post_init()

    def _init_weights(self, module):
        pass

    def get_output_embeddings(self):
        return None

    def forward(self, input_ids, attention_mask=None, position_ids=None, use_cache=None, logits_to_keep=0):
        logits = self.table[input_ids]
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return CausalLMOutput(logits=logits[:, keep])


CASE_19_ROWS = ((0.7, 0.2, 0.1), (0.1, 0.6, 0.3), (0.25, 0.25, 0.5))


def bigram(rows=CASE_19_ROWS):
    """A bigram model with these probabilities: row i is what follows token i."""
    model = Bigram(BigramConfig(vocab_size=len(rows))).eval()
    with torch.no_grad():
        model.table.copy_(torch.tensor(rows).log())
    return model
