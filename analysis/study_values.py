"""What a study's runs measured: every value with its model, seed, state and reading."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from analysis.readings import READINGS, SCORE
from analysis.runs import Run, complete_run
from analysis.targets import Target

HINT = "run make study"
UNTRAINED = "none"
"""How a model's ``training`` is called that is measured as it was initialised."""


class Metric(NamedTuple):
    """One measure of the study."""

    label: str
    digits: int
    """After the point."""
    reads: bool
    """Whether it depends on the stream that is read."""


METRICS = {
    "probe": Metric("linear probe, top-1 %", 1, True),
    "knn": Metric("k-NN (k = 20), top-1 %", 1, True),
    "auc": Metric("Binary-AUC, CLS–patch similarity, max(m, 1−m)", 3, True),
    "raw_auc": Metric("the same, m", 3, True),
    "mixing_auc": Metric("Binary-AUC, CLS row of M, max(m, 1−m)", 3, False),
    "effective_rank": Metric("effective rank of M", 2, False),
    "block_effective_rank": Metric("effective rank of its blocks off the diagonal", 2, False),
    "block_rank": Metric("numerical rank of such a block, largest", 0, False),
    "shuffled_auc": Metric("control: Binary-AUC of a shuffled map, max(m, 1−m)", 3, False),
    "position_auc": Metric("control: Binary-AUC of the distance to the centre, max(m, 1−m)", 3, False),
}


class Value(NamedTuple):
    """A measured value."""

    model: str
    """The trained model's name, of an untrained one too."""
    trained: bool
    seed: int
    metric: str
    stream: str
    """``residual`` or ``branch``; ``-`` for what reads neither."""
    published: bool
    """Whether this is the stream of the family's published results; true of what reads neither."""
    value: float


class Study(NamedTuple):
    """All values, and where they come from."""

    values: list[Value]
    models: list[str]
    seeds: list[int]
    parameters: dict[str, int]
    images: int
    records: dict[str, dict[str, Any]]
    """Of the first seed's runs, task -> run.json."""

    def of(
        self, metric: str, model: str, trained: bool = True, stream: str | None = None, published: bool | None = None
    ) -> list[float]:
        """A value a seed, in the order of the seeds: in a stream, or in the published one or the one beside it."""
        return [
            v.value
            for v in self.values
            if (v.metric, v.model, v.trained) == (metric, model, trained)
            and (stream is None or v.stream in (stream, "-"))
            and (published is None or v.published == published)
        ]

    def streams(self, model: str) -> list[str]:
        """The streams whose maps were read, the published one first; k-NN's is the residual one in every family."""
        found = {v.stream: not v.published for v in self.values if v.model == model and v.metric == "auc"}
        return sorted(found, key=lambda stream: found[stream])


def read(target: Target, runs: Path) -> Study:
    """The values of all models and seeds. ValueError where a run is missing."""
    trained = [model for model in target.models if target.label(model)["training"] != UNTRAINED]
    beside = {_backbone(target, model): model for model in trained}
    folders = target.folders(runs)
    values: list[Value] = []
    parameters: dict[str, int] = {}
    records: dict[str, dict[str, Any]] = {}
    images = 0
    for seed, folder in folders.items():
        assert seed is not None
        for model in target.models:
            name, is_trained = beside.get(_backbone(target, model), model), model in trained
            found = {task: complete_run(folder / f"{model}-{task}", HINT) for task in target.tasks}
            values += [Value(name, is_trained, seed, *rest) for rest in _measured(target, found)]
            parameters[name] = found["auc"].results["backbone_parameters"]
            images = found["auc"].rows[0]["images"]
            records = records or {task: run.record for task, run in found.items()}
    return Study(values, trained, [seed for seed in folders if seed is not None], parameters, images, records)


def _backbone(target: Target, model: str) -> str:
    """The overlay that a model, trained or not, is made of."""
    return target.label(model).get("backbone", model)


def _measured(target: Target, runs: dict[str, Run]) -> Iterator[tuple[str, str, bool, float]]:
    """Metric, stream, whether it is the published one, and value, of one model and seed."""
    places, knn, auc, ranks = (runs[task] for task in target.tasks)
    for published, reading in zip((True, False), READINGS, strict=True):
        heads = [row for row in places.rows if row["pooling"] == "cls" and row["reading"] == reading]
        if heads:
            last = max(row["block"] for row in heads)
            best = max((row for row in heads if row["block"] == last), key=lambda row: row["top1_last"])
            yield "probe", best["stream"], published, 100 * best["top1_last"]
        for row in knn.rows:
            if row["k"] == 20 and row["reading"] == reading:
                yield "knn", row["stream"], published, 100 * row["top1"]
        if maps := auc.maps("similarity", reading=reading):
            yield "auc", maps[-1]["stream"], published, maps[-1][SCORE]
            yield "raw_auc", maps[-1]["stream"], published, maps[-1]["auc"]
    yield "mixing_auc", "-", True, auc.maps("mixing")[-1][SCORE]
    for control in ("shuffled", "position"):
        yield f"{control}_auc", "-", True, next(row[SCORE] for row in auc.rows if row["map"] == control)
    whole = [row for row in ranks.rows if row["direction"] in ("attention", "both")]
    for metric in ("effective_rank", "block_effective_rank"):
        if None not in (means := [row[f"{metric}_mean"] for row in whole]):  # without whole blocks off the diagonal
            yield metric, "-", True, sum(means) / len(means)
    if None not in (ranks_of_blocks := [row["block_rank_max"] for row in whole]):
        yield "block_rank", "-", True, float(max(ranks_of_blocks))
