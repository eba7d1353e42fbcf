"""Several gloo processes for one test."""

import socket

import torch
import torch.multiprocessing as mp


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _enter(function, rank, world, port, arguments, queue):
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    queue.put((rank, function(rank, *arguments)))
    torch.distributed.destroy_process_group()


def run_ranks(function, world, *arguments):
    """``function(rank, *arguments)`` in ``world`` processes; what each returned, in rank order."""
    context, port = mp.get_context("spawn"), free_port()
    queue = context.Queue()
    workers = [context.Process(target=_enter, args=(function, r, world, port, arguments, queue)) for r in range(world)]
    for worker in workers:
        worker.start()
    found = dict(queue.get(timeout=120) for _ in workers)
    for worker in workers:
        worker.join(30)
    return [found[rank] for rank in range(world)]
