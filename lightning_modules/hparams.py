"""Hyper-parameters that let a checkpoint be reloaded by itself."""

import inspect

from lightning.pytorch import LightningModule


def record_hyperparameters(module: LightningModule, *modules: str) -> None:
    """Called in ``__init__``: keeps its arguments as the module's hyper-parameters.

    Built by the command line, everything is kept as configuration, the backbone's class and arguments too, so
    ``load_from_checkpoint`` needs nothing else. Built in Python, the arguments named in ``modules`` are objects, which
    no checkpoint should pickle: pass them to ``load_from_checkpoint`` again.
    """
    frame = inspect.currentframe()
    assert frame is not None
    module.save_hyperparameters(ignore=list(modules), frame=frame.f_back)
    if "_instantiator" in module.hparams:  # Lightning's mark of the command line
        module.save_hyperparameters(frame=frame.f_back)


def global_batch_size(module: LightningModule, given: int | None) -> int:
    """Images per optimiser step over all devices: as given, or the datamodule's ``batch_size``.

    Raises:
        ValueError: where neither is there.
    """
    batch = given or getattr(module.trainer.datamodule, "batch_size", None)
    if batch is None:
        raise ValueError("global_batch_size is not set and the data have no batch_size: set model.global_batch_size")
    return int(batch)
