"""Which samples a run trained on, for tests that count them."""

import json
import os

from lightning.pytorch import Callback

from callbacks.run_folder import run_folder


class KeyLog(Callback):
    """Appends a line for each training batch to ``keys-RANK-PID.jsonl`` in the run's folder."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        line = {"epoch": trainer.current_epoch, "batch": batch_idx, "rank": trainer.global_rank, "keys": batch["key"]}
        with (run_folder(trainer) / f"keys-{trainer.global_rank}-{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


def read_keys(folder):
    return [json.loads(line) for path in sorted(folder.glob("keys-*")) for line in path.read_text().splitlines()]
