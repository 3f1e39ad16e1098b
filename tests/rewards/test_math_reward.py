r"""Mathematics: the last \boxed{}, equality and not spelling, and no text that can stop a run."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from written_rollouts import make_rollout

from strop.config.sampling import MathRewardOptions
from strop.rewards import make_scorer
from strop.rewards.maths import marked_answer
from strop.types import RewardError


@pytest.fixture(scope="module")
def scorer():
    return make_scorer(MathRewardOptions())


@pytest.fixture
def score(scorer):
    return lambda text, label: scorer([make_rollout(text, label)]).rollouts[0].reward


@pytest.mark.parametrize(
    "text, label, reward",
    [
        (r"Answer: \boxed{5}", "5", 1.0),
        (r"\boxed{\frac{1}{3}}", r"\frac{1}{2}", 0.0),
        (r"\boxed{3} … \boxed{7}", "7", 1.0),
        (r"\boxed{3} … \boxed{7}", "3", 0.0),
        ("#### 42" + "x" * 480, "42", 1.0),
        ("#### 42" + " " * 480, "42", 1.0),
        ("#### 42\n" + "and so " * 69, "42", 1.0),
        ("#### 42 " + "and so " * 69, "42", 1.0),
        ("$1,234.00", "1234", 1.0),
        (r"\boxed{\text{E}}", "E", 1.0),
        (r"\boxed{E}", r"\text{E}", 1.0),
        ("\u22123", "-3", 1.0),
        (r"\boxed{\dfrac{1}{2}}", r"\boxed{\frac12}", 1.0),
        (r"\boxed{0.5}", "1/2", 1.0),
        (r"\boxed{(x+1)^2}", "x^2+2x+1", 1.0),
        (r"\boxed{x = 5}", "5", 1.0),
        (r"\boxed{5}", "$5$", 1.0),
        (r"\boxed{5}", 5, 1.0),
        (r"\boxed{50\%}", "50", 1.0),
        (r"\boxed{\{1, 2\}}", r"\{2, 1\}", 1.0),
        (r"\boxed{3, \boxed{4}}", "4", 1.0),
        (r"\boxed{7} and \boxed{", "7", 1.0),
        (r"\boxed{7} #### 8", "7", 1.0),
        ("#### 3 #### 4", "4", 1.0),
        ("#### 1/2", "0.5", 1.0),
        ("#### 3, 4", "3", 0.0),
        ("#### $1,000 in all", "6 * 7 is not it\n#### 1000", 1.0),
        ("The final answer is $\\frac{3}{4}$.", "0.75", 1.0),
        ("so x is 12", "12", 1.0),
        (r"\boxed{god}", "dog", 0.0),
        (r"\boxed{\text{ Dog }}", "dog", 1.0),
        (r"\boxed{12}", "#### 12\nfrom page 7", 1.0),
        (r"\boxed{7}", "#### 12\nfrom page 7", 0.0),
        (r"\boxed{3 + 4}", "7", 1.0),
        (r"\boxed{7" + " + 0" * 100 + "}", "7", 0.0),  # longer than any answer
        (r"\boxed{}", "5", 0.0),
        ("", "5", 0.0),
        (r"\boxed{5", "7", 0.0),
    ],
)
def test_the_final_answer_is_compared_as_mathematics(score, text, label, reward):
    assert score(text, label) == reward


@pytest.mark.parametrize(
    "text",
    [
        r"\boxed{5",
        r"\boxed{",
        "",
        "}" * 1000,
        "a" * 10**6,
        "1" * 10**6,
        "{" * 10**6,
        "$" * 10**6,
        "9^" * (10**6 // 2),
        r"\boxed{" * (10**6 // 7),
        r"\boxed" + "{}" * (10**6 // 2),
        "\x00\ud800",
    ],
    ids=lambda text: f"{text[:8]!r}*{len(text)}",
)
def test_strange_texts_have_a_score_without_running_out_of_time(scorer, text):
    scored = scorer([make_rollout(text, "7")])
    assert (scored.rollouts[0].reward, scored.metrics["reward/num_timeouts"].value) == (0.0, 0)


BOMBS = [r"\boxed{9^{9^{9^9}}}", "9^9^9^9", r"\boxed{(10^{10})!}", r"\boxed{\sum_{n=1}^{10^9} \frac{1}{n}}"]
BOMBS += [r"\boxed{" + "{" * 140 + "1" + "}" * 140 + "}"]


@pytest.mark.parametrize("bomb", BOMBS)
def test_an_answer_that_would_take_for_ever_scores_zero_is_counted_and_the_next_is_scored(scorer, bomb):
    scored = scorer([make_rollout(bomb, "7"), make_rollout(r"\boxed{\frac{14}{2}}", "7")])
    assert [rollout.reward for rollout in scored.rollouts] == [0.0, 1.0]
    assert scored.metrics["reward/num_timeouts"].value == 1
    assert scorer([]).metrics["reward/num_timeouts"].value == 0


@pytest.mark.parametrize("bomb", [r"\boxed{10^{10^{10}}}", r"\boxed{2^{10^9}}", BOMBS[0]])
def test_an_answer_costs_at_most_half_a_second_of_processor_time(scorer, bomb):
    """So that on an idle machine it is scored within 1 s; wall clock would measure what else the machine does."""
    server = Path(f"/proc/{process_of(scorer).pid}/stat")

    def spent():
        """Processor time of the children that the server has waited for."""
        return sum(map(int, server.read_text().rpartition(")")[2].split()[13:15])) / os.sysconf("SC_CLK_TCK")

    scorer([make_rollout(bomb, "7")])  # ends the child that has answered the questions before
    before = spent()
    assert scorer([make_rollout(bomb, "7")]).rollouts[0].reward == 0.0
    assert 0.3 < spent() - before < 0.7


def test_it_works_off_the_main_thread_and_from_many_at_once(score):
    answers = {}

    def ask(number):
        answers[number] = score(rf"\boxed{{\frac{{{2 * number}}}{{2}}}}", str(number % 5))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {number: float(number < 5) for number in range(10)}


def test_the_process_is_started_again_when_it_was_killed():
    scorer = make_scorer(MathRewardOptions())
    process = process_of(scorer)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert scorer([make_rollout(r"\boxed{\frac{14}{2}}", "7")]).rollouts[0].reward == 1.0


def test_a_process_that_does_not_answer_in_time_is_ended_and_started_again(monkeypatch):
    scorer = make_scorer(MathRewardOptions())
    monkeypatch.setattr("strop.rewards.maths_process.MAX_WAIT_S", 0.2)  # below the limit of processor time
    first = process_of(scorer)
    scored = scorer([make_rollout(BOMBS[0], "7")])
    assert first.returncode == -signal.SIGKILL
    assert scored.rollouts[0].reward == 0.0
    assert scored.metrics["reward/num_timeouts"].value == 1
    monkeypatch.undo()
    assert scorer([make_rollout(r"\boxed{\frac{14}{2}}", "7")]).rollouts[0].reward == 1.0


def test_the_process_ends_with_its_scorer_and_with_the_program():
    program = (
        "from strop.config.sampling import MathRewardOptions; from strop.rewards import make_scorer\n"
        "one, two = (make_scorer(MathRewardOptions()) for _ in range(2))\n"
        "process_of = lambda scorer: scorer._metrics.__self__._process._process\n"
        "process = process_of(one); del one\n"
        "print(process.poll(), process_of(two).pid)"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=True)
    status, pid = done.stdout.split()
    assert (status, done.stderr) == (str(-signal.SIGKILL), "")
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


def process_of(scorer):
    """That of math-verify."""
    return scorer._metrics.__self__._process._process


@settings(max_examples=50, deadline=None)
@given(st.text(r"\boxed{}#$^/-1249x .,%" + "\n", max_size=60))
def test_any_text_has_a_score(scorer, text):
    assert scorer([make_rollout(text, "7")]).rollouts[0].reward in (0.0, 1.0)


def test_an_empty_label_is_an_error(score):
    with pytest.raises(RewardError, match=r"^prompt row 0: the label must .* for reward\.kind = math, got empty text"):
        score("5", " ")


@pytest.mark.parametrize(
    "text, answer",
    [
        (r"\boxed{a{b}c} d", "a{b}c"),
        (r"\boxed {5}", "5"),
        (r"\boxed{\}5\{}", r"\}5\{"),
        (r"} \boxed{5} {", "5"),
        (r"{\boxed{5}", "5"),
        (r"\boxed{1} \boxed{2", "1"),
        (r"\boxed{1 \boxed{2}", "2"),
        (r"\boxed{3, \boxed{4}}", "4"),
        (r"\boxed5", None),
        ("#### ", ""),
        ("####\n12\nand", "12"),
        ("#### 12%", "12%"),
        ("#### -$12", "-$12"),
        ("none", None),
    ],
)
def test_the_marked_answer_of_a_text(text, answer):
    assert marked_answer(text) == answer
