"""A loss that is no number stops DINO, leaves nothing behind, and costs no wait for the device."""

import copy
import math

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_modules.finite import FiniteGuard
from tests.lightning_modules.test_dino import QUIET, batches, fit, tiny
from tests.processes import run_ranks


@pytest.mark.parametrize(("every", "asked"), [(None, 2), (1, 2), (4, 3), (50, 5)])
def test_non_finite_loss_stops_before_anything_moves(every, asked):
    """Looked at in each step, every four, or at the end of the epoch: nothing of the bad step is left."""
    data = batches(5)
    data[2]["crops"][0][0, 0, 0, 0] = torch.nan
    module, kept, seen = tiny(), {}, []
    module.check_every = every

    class Watch(Callback):
        def on_train_batch_start(self, trainer, m, batch, batch_idx):
            seen.append(batch_idx)
            if batch_idx == 2:
                kept.update({k: v.clone() for k, v in m.state_dict().items()})
                kept["optimizer"] = copy.deepcopy(trainer.optimizers[0].state_dict()["state"])

    trainer = Trainer(max_epochs=2, callbacks=[Watch()], **QUIET)
    with pytest.raises(FloatingPointError, match=r"the loss is nan at step 2; nothing was updated by it"):
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=None))
    assert seen == list(range(min(asked + 1, 5)))
    optimizer = kept.pop("optimizer")
    for name, value in module.state_dict().items():
        assert torch.equal(value, kept[name]), name
    for number, state in trainer.optimizers[0].state_dict()["state"].items():
        assert all(torch.equal(value, optimizer[number][name]) for name, value in state.items())


def test_no_checkpoint_after_a_non_finite_loss(tmp_path):
    data = batches(5)
    data[2]["crops"][0][0, 0, 0, 0] = torch.inf
    module = tiny()
    module.check_every = 50

    class Save(Callback):
        def on_train_batch_end(self, trainer, m, outputs, batch, batch_idx):
            trainer.save_checkpoint(tmp_path / f"{batch_idx}.ckpt")

    with pytest.raises(FloatingPointError, match=r"step 2"):
        fit(module, data, callbacks=[Save()])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0.ckpt", "1.ckpt"]
    assert not any("finite" in name for name in torch.load(tmp_path / "1.ckpt")["state_dict"])


def test_the_guard_changes_nothing_else():
    """The same weights, teacher and centre whether the loss is looked at in each step or not."""
    seldom, always = tiny().double(), tiny().double()
    seldom.check_every = 50
    for module in (seldom, always):
        fit(module, batches(4, dtype=torch.float64), precision="64-true")
    for (name, a), b in zip(seldom.state_dict().items(), always.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-14, rtol=1e-12, msg=name)


def _guarded(rank):
    guard, said = FiniteGuard(), []
    for step, losses in enumerate(([1.0, 2.0], [1.0, math.inf], [1.0, 1.0], [math.nan, 1.0])):
        guard.note(torch.tensor(losses[rank]), step)
        try:
            guard.check()
        except FloatingPointError as error:
            said.append(str(error).split(";")[0])
    return said


def test_all_ranks_hear_of_one_ranks_loss():
    """And of the first one only."""
    assert run_ranks(_guarded, 2) == [["the loss is inf at step 1"] * 3] * 2


class Reads(TorchDispatchMode):
    """Counts how often a value is asked for, which on a GPU waits for all that was started."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("log_every", [1, 50])
def test_a_step_waits_for_no_value(log_every):
    module, counts = tiny(), []
    module.check_every = 50

    class Watch(Callback):
        def on_train_batch_start(self, trainer, m, batch, batch_idx):
            self.reads = Reads()
            self.reads.__enter__()

        def on_train_batch_end(self, trainer, m, outputs, batch, batch_idx):
            self.reads.__exit__(None, None, None)
            counts.append(self.reads.count)

    fit(module, batches(4), callbacks=[Watch()], log_every_n_steps=log_every)
    assert len(counts) == 4 and not any(counts)
