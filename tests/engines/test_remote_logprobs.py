"""Log-probabilities from a server: the numbers of its model, and a message with the address for everything that goes wrong."""

import threading
import time

import pytest
import torch
from commands.small_runs import small_once
from transformers import AutoModelForCausalLM

from strop.engines import remote_logprobs
from strop.engines.remote_logprobs import RemoteLogprobs
from strop.runtime.audit.teacher_server import Refused, TeacherModel, serving
from strop.types import UserError

ROWS = [[5, 3, 8, 1], [4], [7, 7], [9, 2, 3, 4, 5, 6]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return small_once(tmp_path_factory).start


@pytest.fixture(scope="module")
def model(folder):
    return TeacherModel(folder)


def client(address, *, timeout_s=20.0, num_retries=0):
    return RemoteLogprobs(address, option="distillation.teacher", timeout_s=timeout_s, num_retries=num_retries)


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr(remote_logprobs, "FIRST_WAIT_S", 0.01)


def test_the_numbers_are_those_of_the_served_model(folder, model):
    with serving(model) as address:
        found = client(address + "/").logprobs(ROWS)
    own = AutoModelForCausalLM.from_pretrained(folder)
    for row, numbers in zip(ROWS, found, strict=True):
        with torch.no_grad():
            logprobs = own(torch.tensor([row])).logits[0].log_softmax(-1)
        assert numbers == pytest.approx(
            [0.0] + [logprobs[i, token].item() for i, token in enumerate(row[1:])], abs=1e-5
        )


def test_name_positions_and_texts_come_from_the_server(model):
    with serving(model) as address:
        server = client(address)
        assert (server.model, server.max_positions) == ("start", 8192)
        assert server.detokenize([4, 5]) == model("/detokenize", {"tokens": [4, 5]})["prompt"]


def test_requests_are_in_flight_together_and_answers_stay_in_order(model):
    inside, most, lock = 0, 0, threading.Lock()

    def slow(path, body):
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        for _ in range(1000):  # until others are there too
            if most > 4:
                break
            time.sleep(0.01)
        with lock:
            inside -= 1
        return model(path, body)

    done = []
    with serving(slow) as address:
        server = client(address)
        found = server.logprobs(ROWS * 3, advance=done.append)
        assert found[:4] == found[4:8] == found[8:]
    assert most > 4
    assert done == list(range(1, 13))


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_fault_that_may_pass_is_asked_again(model, status, soon):
    asked = []

    def failing_twice(path, body):
        asked.append(path)
        if path == "/v1/completions" and asked.count(path) < 3:
            raise Refused(status, "busy")
        return model(path, body)

    with serving(failing_twice) as address:
        assert len(client(address, num_retries=2).logprobs(ROWS[:1])[0]) == 4
    assert asked.count("/v1/completions") == 3


def test_a_request_that_the_server_refuses_is_not_asked_again_and_its_words_are_passed_on(model):
    asked = []

    def refusing(path, body):
        asked.append(path)
        if path == "/v1/completions":
            raise Refused(400, "This model's maximum context length is 4 tokens.")
        return model(path, body)

    with serving(refusing) as address, pytest.raises(UserError) as found:
        client(address, num_retries=5).logprobs(ROWS[:1])
    assert f"distillation.teacher = {address} must answer as a vLLM server" in str(found.value)
    assert "/v1/completions failed after 1 try: it answered 400 This model's maximum context length" in str(found.value)
    assert asked.count("/v1/completions") == 1


def test_a_server_that_does_not_answer_in_time_is_given_up_after_the_retries(model, soon):
    over = threading.Event()

    def stuck(path, body):
        if path == "/v1/completions":
            over.wait(100)
        return model(path, body)

    with serving(stuck) as address:
        server = client(address, num_retries=1)
        server._timeout_s = 0.2  # what it answered so far had more
        failed = r"failed after 2 tries: no answer within distillation\.request_timeout_s = 0\.2"
        try:
            with pytest.raises(UserError, match=failed):
                server.logprobs(ROWS[:1])
            assert not over.is_set()
        finally:
            over.set()


def test_an_address_where_nobody_listens_is_named(soon):
    with pytest.raises(UserError, match=r"teacher = http://127.0.0.1:1 .*/v1/models failed after 3 tries: .*refused"):
        client("http://127.0.0.1:1", num_retries=2)


def without_the_token(answer):
    answer["choices"][0]["prompt_logprobs"][1] = {"0": {"logprob": -1.0}}


def one_too_few(answer):
    answer["choices"][0]["prompt_logprobs"].pop()


def none_at_all(answer):
    answer["choices"][0]["prompt_logprobs"] = None


@pytest.mark.parametrize("damage", [without_the_token, one_too_few, none_at_all, dict.clear])
def test_an_answer_in_another_protocol_is_an_error_and_no_number(model, damage):
    def damaged(path, body):
        answer = model(path, body)
        if path == "/v1/completions":
            damage(answer)
        return answer

    with serving(damaged) as address, pytest.raises(UserError, match="is not in that protocol"):
        client(address).logprobs(ROWS[:1])


def test_minus_infinity_comes_back_as_such(model):
    """The server writes it as -9999."""

    def impossible(path, body):
        answer = model(path, body)
        if path == "/v1/completions":
            answer["choices"][0]["prompt_logprobs"][2][str(body["prompt"][2])]["logprob"] = -9999.0
        return answer

    with serving(impossible) as address:
        assert client(address).logprobs(ROWS[:1])[0][2] == float("-inf")
