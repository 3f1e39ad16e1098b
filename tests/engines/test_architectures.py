"""Every architecture that transformers has for text either samples and scores the same numbers, or is refused in one
sentence before anything runs."""

import pytest
import tiny_architectures
import tiny_models
import torch
from made_requests import engine_of, request, rollout_of, run

from strop.config import TorchTrainerOptions
from strop.data import build_batch
from strop.engines import max_positions
from strop.engines.choose import choose_decoder
from strop.engines.decoders import RecomputeDecoder, SlotDecoder, has_full_attention
from strop.engines.lean import lean_decoder
from strop.engines.shared_prompts import SharedPromptDecoder
from strop.trainers import TorchTrainer
from strop.types import ModelError, UserError

PROMPTS = [(3,), (1, 2, 3, 4, 5, 6, 7), (9, 8), (20, 21, 22, 23)]
ALL = tiny_architectures.ARCHITECTURES.keys() - {"bert"}
NOT_PACKED = {
    "opt",
    "bloom",
    "mpt",
    "mamba",
    "mamba2",
    "recurrent_gemma",
    "jamba",
    "bamba",
    "falcon_h1",
    "lfm2",
    "xlstm",
}
PACKED = ALL - NOT_PACKED - {"xglm", "minimax", "biogpt", "gpt_oss", "openai-gpt", "gpt_neo"}


def sampled(model):
    """Three samples of each prompt through five slots, as a batch."""
    requests = [request(prompt, seeds=(5, 6, 7), length=12) for prompt in PROMPTS]
    found = run(engine_of(model, stop=[2, 11], max_sequences=5), *requests)
    pairs = enumerate(zip(PROMPTS, found, strict=True))
    rollouts = [rollout_of(prompt, c, row) for row, (prompt, group) in pairs for c in group]
    return build_batch(rollouts, [1.0] * len(rollouts))


def gaps(model, batch, layout):
    trainer = TorchTrainer(model, TorchTrainerOptions(layout=layout), total_steps=1)
    return (trainer.logprobs(batch) - batch.rollout_logprobs)[batch.loss_mask].abs()


@pytest.mark.parametrize("name", sorted(ALL))
def test_sampled_logprobs_are_the_trainers(name):
    model = tiny_architectures.build(name)
    batch = sampled(model)
    assert gaps(model, batch, "padded").max() < 1e-4  # the promise, in float32 on a CPU
    if name in PACKED:
        assert gaps(model, batch, "packed").max() < 1e-4


@pytest.mark.parametrize("name", sorted(ALL - {"xlstm"}))
def test_in_bfloat16_they_agree_within_the_default_bound(name):
    model = tiny_architectures.build(name).bfloat16()
    batch = sampled(model)
    assert gaps(model, batch, "padded").mean() < 0.1
    if name in PACKED:
        assert gaps(model, batch, "packed").mean() < 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", sorted(ALL - PACKED - {"gpt_neo"}))
def test_packing_is_refused_where_sequences_would_see_each_other(name, dtype):
    # Mamba and its like carry a state through the row; others do not look at positions
    with pytest.raises(UserError, match=r"^trainer.layout must be padded or auto for \w+, got packed: sequences"):
        TorchTrainer(tiny_architectures.build(name).to(dtype), TorchTrainerOptions(layout="packed"), total_steps=1)


def test_a_packed_row_is_no_longer_than_the_model_has_positions():
    # GPT-Neo keeps a mask as wide as it has positions: longer rows would raise
    model = tiny_architectures.build("gpt_neo")
    batch = sampled(model)
    assert sum(batch.lengths) > tiny_models.POSITIONS
    assert gaps(model, batch, "packed").max() < 1e-4


# ---- the decoder -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["falcon_alibi", "jamba", "bamba", "falcon_h1"])
def test_a_cache_of_another_kind_is_found_by_running_it(name):
    # their settings look like those of plain attention
    model = tiny_architectures.build(name)
    assert has_full_attention(model)
    assert choose_decoder(model) is RecomputeDecoder


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox", "qwen3_moe", "deepseek_v3", "falcon"])
def test_plain_attention_gets_the_cache(name):
    assert choose_decoder(tiny_architectures.build(name)) in (lean_decoder, SharedPromptDecoder, SlotDecoder)
    assert choose_decoder(tiny_architectures.build(name).bfloat16()) in (lean_decoder, SharedPromptDecoder, SlotDecoder)


class SeesPadding(tiny_models.Bigram):
    """Adds the mean over the row, padding and later tokens included: no causal model."""

    def forward(self, input_ids, **rest):
        output = super().forward(input_ids, **rest)
        output.logits = output.logits + self.table[input_ids].mean(1, keepdim=True)
        return output


def test_a_model_that_rows_of_unequal_length_disturb_is_refused_in_one_sentence():
    model = SeesPadding(tiny_models.BigramConfig(vocab_size=7)).eval()
    torch.nn.init.normal_(model.table)
    with pytest.raises(
        ModelError, match=r"engine.kind = torch cannot sample from SeesPadding: logits of rows of unequal"
    ):
        engine_of(model)


def test_a_model_that_cannot_read_long_rows_in_its_type_says_so_in_one_sentence():
    # xLSTM in bfloat16 fails where a row is as long as its chunk of 8 tokens
    model = tiny_architectures.build("xlstm").bfloat16()
    says = r"^xLSTMForCausalLM cannot read %s: RuntimeError: .*Float.*BFloat16$"
    with pytest.raises(ModelError, match=says % "1 slots of up to 13 tokens"):
        run(engine_of(model), request(range(9), length=4))
    batch = sampled(tiny_architectures.build("xlstm"))
    with pytest.raises(ModelError, match=says % r"\d+ padded sequences of up to 19 tokens \(\d+ together\)"):
        gaps(model, batch, "padded")


def test_a_model_that_cannot_run_at_all_is_refused_by_engine_and_trainer():
    model = tiny_architectures.build("llama")
    model.model.layers[0].mlp.up_proj = torch.nn.Linear(16, 5)
    for make in (engine_of, lambda m: TorchTrainer(m, TorchTrainerOptions(), total_steps=1)):
        with pytest.raises(
            ModelError, match=r"^LlamaForCausalLM cannot read .* tokens: RuntimeError: The size of tensor"
        ):
            make(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_sees_later_tokens_is_refused_by_engine_and_trainer(dtype):
    # BERT has a causal class, and is bidirectional unless its config says is_decoder: it would learn by looking ahead
    model = tiny_architectures.build("bert").to(dtype)
    with pytest.raises(
        ModelError, match=r"cannot sample from BertLMHeadModel: logits of rows of unequal length differ"
    ):
        engine_of(model)
    with pytest.raises(ModelError, match=r"^BertLMHeadModel is no causal language model"):
        TorchTrainer(model, TorchTrainerOptions(), total_steps=1)


def test_looking_at_a_model_changes_neither_it_nor_the_random_state():
    model = tiny_architectures.build("qwen3_moe")
    tensors = {name: t.clone() for name, t in model.state_dict().items()}
    state = torch.get_rng_state()
    engine_of(model)
    TorchTrainer(model, TorchTrainerOptions(layout="packed"), total_steps=1)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(tensors[name], t) for name, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


# ---- positions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["llama", "gpt2", "gptj", "gpt_neo", "gpt_neox", "opt", "mpt", "openai-gpt", "codegen"]
)
def test_the_limit_is_seen_whatever_the_config_calls_it(name):
    model = tiny_architectures.build(name)
    assert max_positions(model) == tiny_models.POSITIONS
    engine = engine_of(model)
    with pytest.raises(
        UserError, match=r"must fit the model's 64 positions, got 61 prompt tokens \+ 4 response tokens"
    ):
        run(engine, request([3] * 61, length=4))
    full, short = run(engine, request([3] * 60, length=4), request([5, 6], length=4))
    assert len(full[0].tokens) == len(short[0].tokens) == 4


@pytest.mark.parametrize("name", ["bloom", "falcon_alibi", "mamba", "recurrent_gemma"])
def test_models_without_positions_have_no_limit(name):
    model = tiny_architectures.build(name)
    assert max_positions(model) is None
    (completion,) = run(engine_of(model), request([3] * 70, length=3))[0]
    assert len(completion.tokens) == 3


def test_a_config_of_remote_code_that_maps_nothing_is_understood():
    model = tiny_models.bigram()
    del model.config.max_position_embeddings
    assert max_positions(model) is None
    model.config.seq_length = 9
    assert max_positions(model) == 9


def test_a_number_that_bloom_was_trained_at_is_no_limit():
    assert max_positions(tiny_architectures.build("bloom", seq_length=16)) is None
