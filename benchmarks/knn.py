"""k-NN over a bank of ImageNet's size and Vim-B's width, 1,281,167 x 768: against the reference script's algorithm.

That one multiplies a hundredth of the queries with the whole bank, takes the k most similar, and adds up one-hot rows.
"""

import resource
import subprocess
import sys
import time

import torch
import torch.nn.functional as F
from measuring import Line, compare
from torch import Tensor

from metrics import knn_scores

BANK, WIDTH, CLASSES, K, QUERIES = 1_281_167, 768, 1000, 20, 1000
ROUNDS = 3


def reference(queries: Tensor, bank: Tensor, labels: Tensor) -> Tensor:
    """Of DINO's script: (Q, C) votes."""
    queries, columns = F.normalize(queries), F.normalize(bank).t()
    votes = []
    for part in queries.split(len(queries) // 2):  # of 50,000 queries it takes 500 at a time, as here
        similarity, index = (part @ columns).topk(K, largest=True, sorted=True)
        one_hot = torch.zeros(len(part) * K, CLASSES).scatter_(1, labels[index].view(-1, 1), 1)
        weights = (similarity / 0.07).exp()
        votes.append((one_hot.view(len(part), -1, CLASSES) * weights[..., None]).sum(1))
    return torch.cat(votes)


def one(who: str) -> None:
    """Prints the seconds of each round, and the memory above the data in MiB."""
    torch.set_num_threads(2)
    g = torch.Generator().manual_seed(0)
    bank, labels = torch.randn(BANK, WIDTH, generator=g), torch.randint(CLASSES, (BANK,), generator=g)
    queries = torch.randn(QUERIES, WIDTH, generator=g)
    few = bank[:5000]
    torch.testing.assert_close(knn_scores(queries, few, labels[:5000], CLASSES, K), reference(queries, few, labels))
    before, times = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        knn_scores(queries, bank, labels, CLASSES, K) if who == "ours" else reference(queries, bank, labels)
        times.append(time.perf_counter() - start)
    print(*times, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)


def main() -> None:
    found = {}
    for who in ("ours", "reference"):  # each alone in the memory
        run = subprocess.run([sys.executable, __file__, who], capture_output=True, text=True, check=True)
        found[who] = [float(word) for word in run.stdout.split()]
    line = Line(
        f"{QUERIES:,} queries, bank {BANK:,} x {WIDTH}",
        found["ours"][:ROUNDS],
        "the reference script's algorithm",
        found["reference"][:ROUNDS],
    )
    note = f"Beside the data ours held {found['ours'][-1]:.0f} MiB, the reference's {found['reference'][-1]:.0f}."
    compare("knn", [line], note)


if __name__ == "__main__":
    one(sys.argv[1]) if len(sys.argv) > 1 else main()
