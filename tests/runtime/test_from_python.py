"""The commands as functions: strop.load_config, strop.train, strop.sft and strop.evaluate."""

import asyncio

import pytest
from commands.small_runs import metrics, read_lines, same_weights, small_once, without_times

import strop
from strop.types import ConfigError, GuardError, ModelError, RewardError


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_once(tmp_path_factory)


@pytest.fixture
def config_of(small, tmp_path):
    def load(**options):
        options = {name.replace("__", "."): value for name, value in options.items()}
        return strop.load_config(small.train, {"run.folder": str(tmp_path / "run"), **options})

    return load


@pytest.fixture(scope="module")
def held_out(small):
    return {"eval__data__kind": "jsonl", "eval__data__path": f"{small.folder}/held_out.jsonl"} | {
        "eval__data__max_prompts": 8
    }


def test_train_returns_the_lines_of_metrics_and_where_the_model_is(config_of, held_out, tmp_path):
    result = strop.train(config_of(**held_out))
    assert (result.folder, result.model, result.interrupted) == (tmp_path / "run", tmp_path / "run/model", False)
    assert result.steps == read_lines(tmp_path / "run/metrics.jsonl")
    assert [row["step"] for row in result.steps] == [0, 1, 2, 3]  # 0: the evaluation before the first
    assert [evaluation.step for evaluation in result.evaluations] == [0, 3]
    last = result.evaluations[-1].metrics()
    assert {name: result.steps[-1][name] for name in last} == last
    assert (result.model / "config.json").exists()


def test_train_inside_a_running_event_loop_gives_the_same_bits(small, config_of, tmp_path):
    """As in a notebook."""

    async def cell():
        return strop.train(config_of())

    inside = asyncio.run(cell())
    outside = strop.train(strop.load_config(small.train, {"run.folder": str(tmp_path / "outside")}))
    assert without_times(inside.steps) == without_times(outside.steps)
    assert same_weights(inside.model, outside.model)


@pytest.mark.parametrize("wrap", [False, True], ids=["plain", "in_a_running_loop"])
def test_errors_reach_the_caller_as_their_own_kind(config_of, small, tmp_path, wrap):
    def call(config):
        async def cell():
            return strop.train(config)

        return asyncio.run(cell()) if wrap else strop.train(config)

    with pytest.raises(ModelError, match="no such folder"):
        call(config_of(model__path=str(tmp_path / "nothing")))
    with pytest.raises(RewardError, match="17 scores for 16"):
        call(config_of(reward__function=small.reward("too_many"), reward__batched=True))
    with pytest.raises(GuardError, match="max_logprob_gap"):
        call(config_of(guards__max_logprob_gap=1e-12, run__overwrite=True))


def test_an_option_that_does_not_exist_is_refused_from_python_too(config_of):
    with pytest.raises(ConfigError, match=r"rollout\.group_size"):
        config_of(rollout__group_sise=4)


def test_a_config_cannot_be_changed_after_loading(config_of):
    config = config_of()
    with pytest.raises(ValueError, match="frozen"):
        config.rollout.group_size = 8


def test_sft_returns_the_lines_of_metrics_and_lowers_the_loss(small, tmp_path):
    options = {"run.folder": str(tmp_path / "run"), "run.num_steps": 20}
    result = strop.sft(strop.load_config(small.sft, options, command="sft"))
    assert result.steps == read_lines(tmp_path / "run/metrics.jsonl")
    assert [row["step"] for row in result.steps] == list(range(1, 21))
    assert result.steps[-1]["nll"] < result.steps[0]["nll"] - 0.5
    assert [row["loss"] for row in result.steps] == pytest.approx([row["nll"] for row in result.steps], rel=1e-5)
    listed = ["config.toml", "metrics.jsonl", "model", "objective.txt", "report.html"]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == listed


def test_the_first_loss_of_sft_is_the_mean_negative_log_likelihood_of_the_response_tokens(small, tmp_path):
    """Against a loop over the demonstrations, one at a time, with the plain forward pass of transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = {"run.folder": str(tmp_path / "run"), "run.num_steps": 1, "data.shuffle": False, "data.batch_size": 5}
    result = strop.sft(strop.load_config(small.sft, options, command="sft"))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(small.start), AutoTokenizer.from_pretrained(small.start)
    total, count = 0.0, 0
    for row in read_lines(small.folder / "demonstrations.jsonl")[:5]:
        prompt = tokenizer(row["prompt"]).input_ids
        tokens = prompt + tokenizer(row["response"]).input_ids + [tokenizer.eos_token_id]
        with torch.no_grad():
            logprobs = model(torch.tensor([tokens])).logits[0].double().log_softmax(-1)
        for place in range(len(prompt), len(tokens)):
            total -= logprobs[place - 1, tokens[place]].item()
            count += 1
    assert result.steps[0]["nll"] == pytest.approx(total / count, rel=1e-5)


def test_sft_twice_gives_the_same_bits_and_another_seed_others(small, tmp_path):
    def run(name, seed):
        options = {"run.folder": str(tmp_path / name), "seed": seed}
        return strop.sft(strop.load_config(small.sft, options, command="sft"))

    first, again, other = run("first", 0), run("again", 0), run("other", 1)
    assert same_weights(first.model, again.model)
    assert metrics(first.folder) == metrics(again.folder)
    assert not same_weights(first.model, other.model)


def test_evaluate_answers_greedily_as_transformers_does_and_averages_the_scores(small, config_of, held_out):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    found = strop.evaluate(config_of(**held_out, eval__num_samples=4))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(small.start), AutoTokenizer.from_pretrained(small.start)
    greedy, sampled = found.rollouts[:8], found.rollouts[8:]
    for rollout in greedy:
        ids = torch.tensor([tokenizer(rollout.prompt.text).input_ids])
        tokens = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=6)
        assert rollout.tokens == tuple(tokens[0].tolist())
    assert len(sampled) == 8 * 4
    assert len({rollout.text for rollout in sampled}) > 8
    for name, rollouts in (("greedy", greedy), ("sampled", sampled)):
        score = found.scores[name]
        assert score.num_prompts == 8
        assert score.reward == pytest.approx(sum(r.reward for r in rollouts) / len(rollouts), abs=1e-12)
    assert found == strop.evaluate(config_of(**held_out, eval__num_samples=4))


def test_evaluate_writes_nothing(config_of, held_out, tmp_path):
    strop.evaluate(config_of(**held_out))
    assert list(tmp_path.iterdir()) == []


def test_importing_strop_alone_imports_no_command():
    import subprocess
    import sys

    program = (
        "import sys, strop; print(sorted(m for m in sys.modules if m.startswith(('torch', 'strop.', 'pydantic'))))"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.strip() == "[]"
