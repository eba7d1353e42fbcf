import os

import pytest

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported

import torch

from datamodules import prepare
from tests.tiny_runs import run

torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)  # processes beside each other have a core each
for name in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES"):  # `make test` hands these to what the tests start
    os.environ.pop(name, None)


@pytest.fixture
def one_thread():
    """For tiny tensors: ten times as fast as two threads on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def shards(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo")
    prepare.demo(str(out), train=24, validation=20, test=10, samples_per_shard=9)
    return out


@pytest.fixture(scope="session")
def pretrained(shards, tmp_path_factory):
    return run("fit", "dino", shards, tmp_path_factory.mktemp("runs"))
