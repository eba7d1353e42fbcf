"""Which samples a run trained on, for tests that count them."""

import json
import os
import time

from lightning.pytorch import Callback

from callbacks.run_folder import run_folder


class KeyLog(Callback):
    """Appends a line for each training batch to ``keys-RANK-PID.jsonl`` in the run's folder.

    SECONDS_A_BATCH slows the run, so that it can be met inside an epoch.
    """

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        time.sleep(float(os.environ.get("SECONDS_A_BATCH", 0)))
        line = {"epoch": trainer.current_epoch, "batch": batch_idx, "rank": trainer.global_rank, "keys": batch["key"]}
        with (run_folder(trainer) / f"keys-{trainer.global_rank}-{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


def read_keys(folder):
    return [json.loads(line) for path in sorted(folder.glob("keys-*")) for line in path.read_text().splitlines()]
