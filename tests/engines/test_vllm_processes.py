"""Servers that strop starts: with a program that stands for vLLM's Python and answers by a server of this process."""

import asyncio
import os
import signal

import pytest
import tiny_models
from made_requests import engine_of, request, run
from made_servers import run_closed

from strop.config import VLLMEngineOptions
from strop.engines.vllm.engine import VLLMEngine
from strop.engines.vllm.process import Served
from strop.runtime.audit import engine_servers
from strop.types import EngineError, UserError

REQUESTS = [request([3, 4], seeds=(1, 2, 3)), request([5], seeds=(4,)), request([9, 8], seeds=(5, 6))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    tiny_models.llama().save_pretrained(folder / "model")
    with engine_servers.standing(folder):
        yield folder


@pytest.fixture
def python(folder):
    engine_servers.begin()
    return folder / engine_servers.PYTHONS[0]


def children():
    """Ids of the processes that this one started and that run still."""
    found = [int(pid) for task in os.listdir("/proc/self/task") for pid in _children_of(task)]
    return {pid for pid in found if "proxy.py" in _command(pid)}


def _children_of(task):
    try:
        with open(f"/proc/self/task/{task}/children") as children:
            return children.read().split()
    except FileNotFoundError:  # the thread has ended
        return []


def _command(pid):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as command:
            return command.read().decode()
    except OSError:  # it ends meanwhile
        return ""


def started(python, work, *, tell=lambda words: None, **changes):
    chosen = VLLMEngineOptions(python=str(python), **{"start_timeout_s": 60.0, "request_timeout_s": 60.0, **changes})
    weights = list(tiny_models.llama().named_parameters())
    engine = VLLMEngine(chosen, Served("nowhere", "float32", True), weights, stop_token_ids=(), tell=tell)
    return run_closed(engine, work)


async def answers(engine):
    return await asyncio.gather(*map(engine.generate, REQUESTS))


def tokens(answers):
    return [[c.tokens for c in completions] for completions in answers]


def test_as_many_servers_as_asked_for_are_started_told_of_and_ended(python):
    told = []

    async def work(engine):
        return await answers(engine), children()

    found, running = started(python, work, num_servers=2, tell=told.append, server_args=("--seed", "7"))
    assert tokens(found) == tokens(run(engine_of(tiny_models.llama()), *REQUESTS))
    assert len(running) == len(told) == 2
    assert all("starts; its log is /" in words for words in told)
    assert children() == set()
    asked = [[name for name in seen if name.startswith("started")] for seen in engine_servers.seen()]
    assert "--worker-extension-cls strop_vllm.Extension" in asked[0][0]
    assert "--enforce-eager --no-enable-chunked-prefill" in asked[0][0]
    assert asked[0][0].endswith("--seed 7 --host 127.0.0.1 --port")
    assert [len(seen) > 1 for seen in engine_servers.seen()] == [True, True]  # both were given weights


def test_a_server_that_is_killed_is_started_again_and_given_the_current_weights(python):
    told, source = [], tiny_models.llama(7)

    async def work(engine):
        await engine.update_weights(source.named_parameters(), 3)
        for pid in children():
            os.kill(pid, signal.SIGKILL)
        found = await answers(engine)
        return found, await engine.update_weights(source.named_parameters(), 4)

    found, metrics = started(python, work, tell=told.append)
    assert tokens(found) == tokens(run(engine_of(source), *REQUESTS))
    assert {v for completions in found for c in completions for v in c.policy_versions} == {3}
    assert metrics["engine_restarts"].value == 1
    assert [words.split("(")[0].split("http")[0] for words in told] == ["vLLM server "] * 3
    assert "is lost" in told[1]
    assert "starts again" in told[2]


def test_a_server_that_dies_at_once_is_reported_with_its_last_words(tmp_path):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no kernel for this device >&2\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(UserError, match=r"ended with code 3\. Its last lines, of /.*\.log:\nno kernel for this device"):
        started(broken, answers)


def test_a_server_that_is_killed_again_while_it_starts_is_started_once_more(python, folder):
    """Its second start ends before it answers."""
    once, starts = folder / "once", folder / "starts"
    once.write_text(
        python.read_text().replace("exec", f'echo >>"{starts}"; [ $(wc -l <"{starts}") = 2 ] && kill -9 $$; exec')
    )
    once.chmod(0o755)
    told = []

    async def work(engine):
        await answers(engine)
        for pid in children():
            os.kill(pid, signal.SIGKILL)
        return await answers(engine)

    found = started(once, work, tell=told.append, max_restarts=2)
    assert tokens(found) == tokens(run(engine_of(tiny_models.llama()), *REQUESTS))
    assert len(starts.read_text()) == 3
    assert [words for words in told if "ended with code -9" in words]
    starts.unlink()
    with pytest.raises(
        EngineError, match=r"was lost 2 times in a row .*: the vLLM server of /.* ended with code -9\. Its"
    ):
        started(once, work, max_restarts=1)


def test_a_server_that_dies_again_and_again_ends_the_run_with_its_last_words(python, folder):
    dying = folder / "dying"
    dying.write_text(python.read_text().replace("exec", "echo about to die >&2; exec"))
    dying.chmod(0o755)

    async def work(engine):
        await answers(engine)
        engine_servers.begin(lambda: _killing)
        return await answers(engine)

    def _killing(path, body, answer):
        if path.endswith("/generate"):
            for pid in children():
                os.kill(pid, signal.SIGKILL)
        return answer()

    with pytest.raises(EngineError, match=r"was lost 2 times in a row \(engine\.max_restarts = 1\)[\s\S]*about to die"):
        started(dying, work, max_restarts=1)
    assert children() == set()


def test_without_an_environment_for_vllm_the_message_says_how_to_get_one():
    with pytest.raises(
        UserError, match=r"engine\.python must be .*got '/nowhere/python': there is none\. make vllm-env makes one"
    ):
        started("/nowhere/python", answers)


def test_servers_that_sleep_while_the_trainer_works_wake_for_weights_and_for_samples(python):
    async def work(engine):
        found = [await answers(engine)]
        await engine.rest()
        found.append(await answers(engine))  # woken by who asks for samples
        await engine.rest()
        await engine.update_weights(tiny_models.llama(7).named_parameters(), 1)
        found.append(await answers(engine))
        return found

    before, again, after = started(python, work, num_servers=2, sleep=True)[:3]
    assert tokens(before) == tokens(again)
    assert tokens(after) == tokens(run(engine_of(tiny_models.llama(7)), *REQUESTS))
    assert [(seen["sleep 1"], seen["wake_up"]) for seen in engine_servers.seen()] == [(2, 2)] * 2
    assert all(
        "--enable-sleep-mode" in name for seen in engine_servers.seen() for name in seen if name.startswith("started")
    )


def test_a_server_that_is_lost_while_it_sleeps_is_brought_back(python):
    async def work(engine):
        await answers(engine)
        await engine.rest()
        for pid in children():
            os.kill(pid, signal.SIGKILL)
        return await answers(engine)

    found = started(python, work, sleep=True)
    assert tokens(found) == tokens(run(engine_of(tiny_models.llama()), *REQUESTS))


def test_servers_that_need_not_sleep_do_not(python):
    async def work(engine):
        await answers(engine)
        await engine.rest()
        return await answers(engine)

    started(python, work)
    assert all("sleep 1" not in seen for seen in engine_servers.seen())
