"""Plans for tests, small and with numbers that a hand can work with."""

from strop.config.simulation import load_simulation


def plan(**options):
    """The plan of the tests with other values for these options.

    Two engines get two of four groups of two each: 4 sequences, a token takes .5 + 4 x .25 = 1.5 s, 10 tokens 15 s. Scores:
    8 x .5 s by 2 scorers = 2 s. Training: 3 + .01 x (8 x (10 + 5)) / 2 = 3.6 s. New weights: 1 s.
    """
    values = {
        "num_steps": 5,
        "prompts_per_step": 4,
        "group_size": 2,
        "max_off_policy_steps": 0,
        "response_tokens": [10],
        "prompt_tokens": 5,
        "num_engines": 2,
        "max_sequences": 4,
        "decode_step_s": 0.5,
        "decode_sequence_s": 0.25,
        "score_s": 0.5,
        "num_scorers": 2,
        "scores_early": False,
        "num_trainers": 2,
        "train_step_s": 3,
        "train_token_s": 0.01,
        "transfer_s": 1,
    }
    return load_simulation(None, values | options)
