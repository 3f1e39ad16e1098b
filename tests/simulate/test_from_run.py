"""Times and lengths of a run folder: what is read, and that the simulated run takes as long as the real one."""

import json

import pytest
from simulate.recorded import RECORDED, seconds_of, write_run

from strop.config.simulation import load_simulation
from strop.simulate import measure, simulate
from strop.simulate.from_run import _two_parts

STEPS = RECORDED["steps"]


def simulated_step_s(runs, **options):
    plan = load_simulation(None, options, measured=measure(runs) | {"max_off_policy_steps": 0})
    found = simulate(plan)
    return found.seconds / len(found.steps)


def test_every_second_step_says_how_long_the_others_take(tmp_path):
    """Within 10 %. The first step of a folder is left out, so it is there twice."""
    run = write_run(tmp_path / "run", [STEPS[0], *STEPS[::2]])
    others = STEPS[1::2]
    assert simulated_step_s([run]) == pytest.approx(sum(map(seconds_of, others)) / len(others), rel=0.1)


def test_a_run_says_how_long_one_with_another_seed_takes(tmp_path):
    run = write_run(tmp_path / "run", [STEPS[0], *STEPS])
    assert simulated_step_s([run], seed=1) == pytest.approx(RECORDED["another_seed_step_s"], rel=0.1)


def test_the_options_are_those_of_the_run(tmp_path):
    found = measure([write_run(tmp_path / "run", STEPS[:3])])
    used = STEPS[1:3]
    lengths = [length for step in used for group in step["responses"] for length in group]
    assert found["response_tokens"] == lengths
    assert (found["prompts_per_step"], found["group_size"]) == (24, 8)
    assert (found["num_engines"], found["max_sequences"], found["shared_gpus"]) == (1, 64, True)
    assert found["prompt_tokens"] == pytest.approx(sum(8 * sum(step["prompts"]) for step in used) / len(lengths))
    assert found["score_s"] == pytest.approx(sum(step["seconds"]["score"] for step in used) / len(lengths))
    assert found["transfer_s"] == 0


def made_step(step_s, sequence_s, token_s, fixed_s, groups, prompts=4):
    """Times of an engine and a trainer that are exactly as the simulation has them; one place takes one sample at a time."""
    tokens = sum(map(sum, groups))
    steps = max(max(group) for group in groups)  # all at once
    sample = step_s * steps + sequence_s * tokens
    train = fixed_s + token_s * (tokens + prompts * sum(map(len, groups)))
    times = {"sample": sample, "score": 0.8, "train": train, "logprobs": 0.0, "weights": 2.0}
    return {"seconds": times, "prompts": [prompts] * len(groups), "responses": groups}


def test_times_are_found_again_where_the_steps_differ_enough(tmp_path):
    groups = [[[9] * 8], [[3, 9, 1, 2] * 2], [[9, 1] * 4, [2, 2]], [[50] + [1] * 7], [[20] * 8] * 3]
    run = write_run(tmp_path / "run", [made_step(0.03, 0.002, 0.01, 1.5, group) for group in groups])
    found = measure([run])
    assert found["decode_step_s"] == pytest.approx(0.03)
    assert found["decode_sequence_s"] == pytest.approx(0.002)
    assert found["train_token_s"] == pytest.approx(0.01)
    assert found["train_step_s"] == pytest.approx(1.5)
    assert found["transfer_s"] == pytest.approx(2)


def test_steps_that_are_alike_leave_all_to_the_main_part(tmp_path):
    step = made_step(0.03, 0.002, 0.01, 1.5, [[9] * 8])
    found = measure([write_run(tmp_path / "run", [step] * 4)])
    assert found["decode_step_s"] == pytest.approx(0.03 + 8 * 0.002)
    assert found["train_token_s"] == pytest.approx(0.01 + 1.5 / (8 * 13))
    assert (found["decode_sequence_s"], found["train_step_s"]) == (0, 0)


def test_a_second_run_tells_the_parts_apart_and_the_first_one_says_the_rest(tmp_path):
    one, other = ([made_step(0.03, 0.002, 0.01, 1.5, [[9] * number])] * 3 for number in (8, 32))
    found = measure([write_run(tmp_path / "one", one), write_run(tmp_path / "other", other)])
    assert (found["decode_step_s"], found["decode_sequence_s"]) == pytest.approx((0.03, 0.002))
    assert len(found["response_tokens"]) == 16


@pytest.mark.parametrize("seconds", [[1.0, 3.0, 2.0], [4.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
def test_a_fit_has_no_negative_part_and_keeps_the_sum(seconds):
    main, other = [1.0, 2.0, 4.0], [1.0, 1.0, 1.0]
    a, b = _two_parts(main, other, seconds)
    assert min(a, b) >= 0
    assert a * 7 + b * 3 == pytest.approx(sum(seconds))


@pytest.mark.parametrize(
    "table, engines",
    [
        ('kind = "vllm"\nnum_servers = 3\nserver_args = ["--max-num-seqs", "48"]', (3, 48, False)),
        ('kind = "vllm_in_process"\nengine_args = ["--max-num-seqs=48"]', (1, 48, True)),
    ],
    ids=["servers", "in process"],
)
def test_servers_are_engines_with_gpus_of_their_own_and_others_share_the_trainers(tmp_path, table, engines):
    run = write_run(tmp_path / "run", STEPS[:3])
    config = (run / "config.toml").read_text()
    (run / "config.toml").write_text(f"{config}[engine]\n{table}\n")
    found = measure([run])
    assert (found["num_engines"], found["max_sequences"], found["shared_gpus"]) == engines


def test_rollouts_that_are_text_alone_have_lengths_too(tmp_path):
    run = write_run(tmp_path / "run", STEPS[:3])
    for path in (run / "rollouts").iterdir():
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        kept = [{"prompt_row": row["prompt_row"], "num_response_tokens": row["num_response_tokens"]} for row in rows]
        path.write_text("".join(json.dumps(row) + "\n" for row in kept))
    found = measure([run])
    assert len(found["response_tokens"]) == 2 * 24 * 8
    assert found["prompt_tokens"] == 0
