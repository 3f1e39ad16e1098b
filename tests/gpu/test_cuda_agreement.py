"""What changes on a GPU is the device alone. Not run where there is none."""

import asyncio

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from strop.config import TorchTrainerOptions
from strop.data import build_batch
from strop.engines import TorchEngine
from strop.rollout import sample_group
from strop.trainers import TorchTrainer
from strop.types import Prompt, Sampling


@pytest.mark.gpus(1)
def test_engine_and_trainer_agree_on_a_gpu():
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, max_position_embeddings=64, eos_token_id=1, **shape)).cuda()
    engine = TorchEngine(model, stop_token_ids={1}, max_sequences=4)
    prompt = Prompt(row=0, tokens=(5, 6, 7), text="")
    sampling = Sampling(max_response_tokens=16)
    work = sample_group(engine, prompt, group_id=0, seeds=range(8), sampling=sampling, decode=str)
    group = asyncio.run(work)
    batch = build_batch(group.rollouts, [1.0] * 8)
    trainer = TorchTrainer(model, TorchTrainerOptions(), total_steps=1)
    difference = (trainer.logprobs(batch) - batch.rollout_logprobs)[batch.loss_mask].abs()
    assert difference.max() < 1e-4  # float32, two orders of summation
