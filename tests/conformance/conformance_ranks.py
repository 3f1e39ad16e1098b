"""Real processes that train together: each holds some sequences of a step, gradients are summed by a plain all-reduce."""

import multiprocessing
import os
import socket
import sys
import traceback
from datetime import timedelta
from multiprocessing.connection import wait

import conformance_cases as suite
import torch
import torch.distributed as dist

WORLD, PATIENCE_S = 3, 60


def serve(rank, meeting_place, pipe):
    """A rank: answers each (number of ranks, case, sequences of each rank) until it is sent None."""
    torch.set_num_threads(1)
    try:
        os.environ["GLOO_SOCKET_IFNAME"] = _loopback()  # a machine's own name may resolve to nothing
        dist.init_process_group(
            "gloo", init_method=meeting_place, rank=rank, world_size=WORLD, timeout=timedelta(seconds=PATIENCE_S)
        )
        worlds = {size: dist.new_group(list(range(size))) for size in range(2, WORLD + 1)}
        for size, name, shares in iter(pipe.recv, None):
            if rank < size:
                pipe.send(_step_together(worlds[size], name, shares[rank]))
        dist.destroy_process_group()
    except Exception:  # noqa: BLE001 - told to the test, which fails with it
        pipe.send(traceback.format_exc())


def _loopback():
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")


def _step_together(world, name, sequences):
    """Weights and selected tokens over the whole step, then this rank's sequences alone, then the sum over ranks."""
    objective = suite.objective_of(name)
    mine = suite.prepared(suite.made_batch(), objective).select(sequences)
    metrics, gradients = suite.stepped(mine, objective, budget=suite.UNEVEN)
    shapes = {key: p.shape for key, p in suite.trainer_of().model.named_parameters()}
    own = [gradients.get(key, torch.zeros(shape)) for key, shape in shapes.items()]
    flat = torch.cat([torch.tensor([metrics.get("loss", 0.0)]), *(gradient.flatten() for gradient in own)])
    dist.all_reduce(flat, group=world)
    return flat.numpy(), not gradients


def _unflattened(flat):
    parameters = dict(suite.trainer_of().model.named_parameters())
    parts = flat[1:].split([p.numel() for p in parameters.values()])
    return float(flat[0]), {key: part.view(p.shape) for (key, p), part in zip(parameters.items(), parts, strict=True)}


class Ranks:
    """WORLD processes, started once and asked many times."""

    def __init__(self, folder):
        context = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
        if sys.platform == "linux":
            context.set_forkserver_preload(["conformance_ranks"])  # torch and transformers are imported once
        place = f"file://{folder}/meeting_place"
        self._pipes, self._processes = [], []
        for rank in range(WORLD):
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(rank, place, there), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def step(self, name, shares):
        """What each rank holds after the sum: (loss, gradients, whether it had nothing to train on)."""
        for pipe in self._pipes:
            pipe.send((len(shares), name, shares))
        waiting = dict(zip(self._pipes, range(len(shares)), strict=False))
        answers = {}
        while waiting:
            ready = wait(list(waiting), PATIENCE_S)
            assert ready, f"ranks {sorted(waiting.values())} said nothing for {PATIENCE_S} s"
            for pipe in ready:
                answer = pipe.recv()
                assert not isinstance(answer, str), f"rank {waiting[pipe]}:\n{answer}"
                flat, is_idle = answer
                answers[waiting.pop(pipe)] = (*_unflattened(torch.from_numpy(flat)), is_idle)
        return [answers[rank] for rank in range(len(shares))]

    def close(self):
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        for pipe in self._pipes:
            pipe.close()
