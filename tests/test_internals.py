"""What is reached of other packages beyond what they document: a move of theirs fails here, by name, not in a run."""

import inspect

import numpy as np
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.utils.data import DataLoader

from common import messages


class One(LightningModule):
    """Trains one parameter."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(1))

    def training_step(self, batch, batch_idx):
        return (self.w * batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def test_lightnings_command_line():
    """What lightning_cli overrides is called by these names, and the module keeps how it was made."""
    for name in (
        "_parse_ckpt_path",
        "_prepare_subcommand_kwargs",
        "_subcommand_method_arguments",
        "before_instantiate_classes",
    ):
        assert name in inspect.getsource(LightningCLI), name
    assert "parser_class" in inspect.signature(LightningCLI.__init__).parameters
    assert '"_instantiator"' in inspect.getsource(inspect.getmodule(LightningCLI))
    assert ArgumentParser(exit_on_error=False).exit_on_error is False and callable(ArgumentParser.error)


def test_lightnings_loops(tmp_path):
    """Callbacks and schedules read and set these; a checkpoint's progress lies there."""
    trainer = Trainer(max_epochs=2, logger=TensorBoardLogger(tmp_path), accelerator="cpu", enable_progress_bar=False)
    trainer.fit(One(), DataLoader(torch.ones(3), batch_size=None))
    epoch_loop = trainer.fit_loop.epoch_loop
    assert callable(epoch_loop._broadcast_sigterm_tensor) and isinstance(epoch_loop._batches_that_stepped, int)
    assert epoch_loop.batch_progress.current.processed == 3 and trainer.fit_loop.epoch_progress.current.processed == 2
    assert "_broadcast_sigterm_tensor()" in inspect.getsource(type(epoch_loop))
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    saved = torch.load(tmp_path / "x.ckpt", weights_only=True)
    loop = saved["loops"]["fit_loop"]
    assert loop["epoch_loop.batch_progress"]["is_last_batch"] is True
    writer = trainer.logger.experiment._get_file_writer()
    assert "tfevents" in writer.event_writer._file_name
    assert MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu")).scaler is not None


def test_an_unset_combined_loader_hides_what_went_wrong():
    """messages.origin looks behind this message."""
    from lightning.pytorch.utilities.combined_loader import CombinedLoader

    try:
        len(CombinedLoader([[1]]))
    except RuntimeError as error:
        assert "iter(combined_loader)" in str(error)
        error.__context__ = ValueError("what it was")
        assert str(messages.origin(error)) == "what it was"
    else:
        raise AssertionError("Lightning no longer refuses: origin can go")


def test_torch():
    """A fused optimiser that a GradScaler has unscaled, shared memory, schedules in closed form, a worker's parent."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], fused=True)
    assert optimizer._step_supports_amp_scaling
    assert "OptState.UNSCALED" in inspect.getsource(torch.amp.GradScaler.step)
    assert torch.UntypedStorage._new_shared(8).nbytes() == 8
    assert hasattr(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3), "_get_closed_form_lr")
    v, g = torch.randn(3, 2), torch.ones(3, 1)
    torch.testing.assert_close(torch._weight_norm(v, g, 0), v / v.norm(dim=1, keepdim=True))
    torch._foreach_clamp_max_(torch._foreach_norm([v, g]), 1.0)


def test_numpy():
    """Checkpoints hold numpy's numbers by this name."""
    module = np.float64(0).__reduce__()[0].__module__
    assert module in ("numpy._core.multiarray", "numpy.core.multiarray")
