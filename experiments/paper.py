"""What ``paper.yaml`` may say. All of it is checked when it is read, before anything is planned, and without torch."""

import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

import analysis
import configs
from analysis.published import read as read_published
from common import yaml_files
from common.ranges import RANGES
from experiments.checks import (
    Check,
    anything,
    by,
    either,
    flag,
    keys,
    like,
    list_of,
    null_or,
    number,
    one_of,
    refuse,
    text,
)  # fmt: skip

DATASETS = ("imagenet", "demo")
"""Those that pages know."""
TABLES = ("probe", "robustness", "dense", "test")
"""Kinds whose rows stand beside the paper's numbers."""
VERBS = ("fit", "validate", "test")
MAPS = ("similarity", "mixing")
TOKENS = ("first", "register", "patch")
SCORES = ("auc_of_mean_normalized", "shown_auc")
"""What orders are compared by."""
STUDY_METRICS = (
    "probe", "knn", "auc", "raw_auc", "mixing_auc", "effective_rank", "block_effective_rank", "block_rank",
    "shuffled_auc", "position_auc",
)  # fmt: skip
SWEEP_TASKS = ("ranks512", "auc_both", "probe", "knn")
"""Those that a sweep can read."""
POOLING = r"(cls|mean|max|register\d+|head\d+)"
HEAD: dict[str, Check] = {
    "n_last_blocks": number(1, whole=True),
    "pooling": like(rf"{POOLING}(\+{POOLING})*", "cls, mean, max, registerN, headN, or several joined by +"),
    "lr": number(0),
    "weight_decay": number(0),
    "batch_norm": flag,
    "block": number(whole=True),
    "stream": one_of(("published", "branch", "residual")),
}
"""What rows of a probe have, beside which a number of the paper can stand."""
PERCENT = number(0, 100)
SEEDS = list_of(number(0, 2**32 - 1, whole=True), least=1)
DENSE = ("mIoU", "mAcc", *(f"AP{of}{size}" for of in "bm" for size in ("", "50", "75", "_small", "_medium", "_large")))


def load(path: Path) -> dict[str, Any]:
    """The file's content.

    Raises:
        ValueError: the first thing in it that is wrong.
    """
    written = path.read_text(encoding="utf-8")
    try:
        try:
            yaml_files.check(written)
            content = yaml.safe_load(written)
        except yaml.YAMLError as error:
            raise ValueError(" ".join(str(error).split())) from None
        check(content)
    except ValueError as error:
        raise ValueError(f"{path.parent.name}/{path.name}: {error}") from None
    return content


def check(content: Any) -> None:
    """ValueError for the first thing that is wrong: its key, what was found, what is allowed."""
    named = by(text, by(text, anything))
    sections = dict.fromkeys(("data", "methods", "tasks", "models", "targets"), named)
    keys(sections | {"paper": anything})(content, "")
    parts = dict.fromkeys(name for entry in content["data"].values() for name in entry)
    overlays = {path.stem for name in DATASETS for path in (configs.ROOT / "paper" / name).glob("*.yaml")}
    run = {"config": _file("task"), "verb": one_of(VERBS), "data": one_of(parts)}
    overlay, task = {"overlay": one_of(sorted(overlays))}, one_of(content["tasks"])
    by(text, keys(run | overlay))(content["methods"], "methods")
    special = {"needs_probe": task, "tests_probe": task, "prints_config": flag}
    by(text, keys(run, overlay | special))(content["tasks"], "tasks")
    used = sorted({entry["data"] for entry in (*content["tasks"].values(), *content["methods"].values())})
    by(one_of(DATASETS), keys({name: _file("data") for name in used}))(content["data"], "data")
    for name, entry in content["models"].items():
        _check_model(name, entry, content["methods"])
    for name, entry in content["targets"].items():
        _check_target(f"targets.{name}", entry, content)
    groups = [name[:-1] for name in content["targets"] if re.fullmatch(r".*\d[a-z]", name)]
    list_of(one_of([*content["targets"], *dict.fromkeys(groups)]))(content["paper"], "paper")


@cache
def kinds() -> list[str]:
    """Every kind that a file of ``analysis`` registers, by its text: importing them brings torch."""
    files = Path(analysis.__path__[0]).glob("*.py")
    found = (re.findall(r'^\s*@(?:renderer|figure)\("(\w+)"', path.read_text(encoding="utf-8"), re.M) for path in files)
    return sorted(name for names in found for name in names)


def _file(folder: str) -> Check:
    """A YAML file in a folder of configs."""

    def check(value: Any, key: str) -> None:
        if not isinstance(value, str) or not configs.find(f"{folder}/{value}.yaml").is_file():
            refuse(key, value, f"a file of configs/{folder}: {', '.join(configs.names(folder))}")

    return check


def _check_model(name: str, entry: Mapping[str, Any], methods: Mapping[str, Any]) -> None:
    key = f"models.{name}"
    optional: dict[str, Check] = {
        "family": text,
        "backbone": _file("backbone"),
        "method": null_or(one_of(methods)),
        "changes": by(text, anything),
        "side": number(1, whole=True),
    }
    keys({"label": text, "mixer": text, "training": text}, optional)(entry, key)
    backbone = entry.get("backbone", name)
    _file("backbone")(backbone, f"{key}, whose name is its backbone where it says none")
    untrained = "method" in entry and entry["method"] is None
    if untrained != (entry["training"] == "none"):
        refuse(f"{key}.training", entry["training"], "none where method is null, and nowhere else")
    if changes := entry.get("changes"):
        overlay = yaml.safe_load(configs.find(f"backbone/{backbone}.yaml").read_text(encoding="utf-8"))
        arguments = overlay["model"]["init_args"]["backbone"]["init_args"]  # overlays are complete
        keys({}, {a: number() if a in RANGES else anything for a in arguments})(changes, f"{key}.changes")


def _check_target(key: str, entry: Mapping[str, Any], content: Mapping[str, Any]) -> None:
    """A target: what it is made of, then what else it is told."""
    runs = isinstance(entry.get("tasks"), list) and len(entry["tasks"]) > 0
    made_of: dict[str, Check] = {
        "title": text,
        "kind": one_of(kinds()),
        "tasks": list_of(one_of(content["tasks"])),
        "models": by(one_of(content["data"]), list_of(one_of(content["models"]), least=int(runs))),
    }
    keys(made_of, dict.fromkeys(entry, anything) | {"parts": by(text, by(text, anything))})(entry, key)
    if not entry["models"]:
        refuse(f"{key}.models", entry["models"], f"models for {' or '.join(content['data'])}")
    required, optional = _options(entry, content)
    keys(made_of | required, optional)(entry, key)
    if entry["kind"] in TABLES:
        _check_numbers(entry.get("published", []), f"{key}.published")
    if entry["kind"] == "sweep":
        list_of(one_of(SWEEP_TASKS))(entry["tasks"], f"{key}.tasks")
        varied = entry["over"]["key"]
        for name in (name for names in entry["models"].values() for name in names):
            model = content["models"][name]
            given = model.get("side") if varied == "side" else model.get("changes", {}).get(varied)
            if given is None or "family" not in model:
                raise ValueError(f"{key}.over: models.{name} says no {'family' if given is not None else varied}")


def _options(entry: Mapping[str, Any], content: Mapping[str, Any]) -> tuple[dict[str, Check], dict[str, Check]]:
    """What a target must be told besides what it is made of, and what it may be told. Other people's kinds take all."""
    models = entry["models"]
    model = one_of(list(dict.fromkeys(name for names in models.values() for name in names)))
    overlays = [content["tasks"][name].get("overlay", name) for name in entry["tasks"]]
    overlays += [method["overlay"] for method in content["methods"].values()]

    def by_data(inner: Check) -> Check:
        return by(one_of(models), inner)

    def of_models(inner: Callable[[Check], Check]) -> Check:
        return keys({}, {data: inner(one_of(names)) for data, names in models.items()})

    every: dict[str, Check] = {
        "default_data": one_of(models),
        "default_runs": either(dict, by_data(text), text),
        "overlays": either(list, list_of(one_of(overlays)), flag),
        "seeds": either(dict, by_data(SEEDS), SEEDS),
        "statement": text,
        "remarks": list_of(text),
        "inferred": flag,
    }
    fields = {"robustness": {"set": one_of(_sets())}, "dense": {"metric": one_of(DENSE)}}.get(entry["kind"], HEAD)
    parts = by_data(by(text, list_of(keys({}, fields), least=1)))
    table: dict[str, Check] = {"parts": parts, "published": list_of(_published(entry, fields))}
    figure: dict[str, Check] = {
        "compared": one_of(SCORES),
        "orders": of_models(lambda one: list_of(list_of(_side(one), least=2))),
    }
    shown = {"pictures": number(1, whole=True), "first_picture": number(0, whole=True)}
    maps = {"maps": list_of(keys({"kind": one_of(MAPS)}, {"part": one_of(TOKENS)}), least=1)}
    halves = dict.fromkeys(("top", "bottom"), of_models(lambda one: list_of(one, least=1)))
    claim = {"says": text, "higher": model, "lower": model, "of": list_of(one_of(STUDY_METRICS), least=1)}
    told: dict[str, tuple[dict[str, Check], dict[str, Check]]] = {
        **dict.fromkeys(TABLES, ({}, table)),
        **dict.fromkeys(("bars", "sizes", "heads", "registers", "layers", "first_component"), ({}, figure)),
        **dict.fromkeys(("ranks", "scoring", "demo", "claims", "mixing_drawing", "metric_drawing"), ({}, {})),
        "maps": (maps, figure | shown | {"curves": one_of(("none", "right", "below"))}),
        "components_and_maps": (maps | halves, figure | shown),
        "dino_drawing": ({}, {"recipe": by(like(r"(model|data)\.\w+", "model.NAME, data.NAME"), number())}),
        "study": ({"reference": model, "claims": list_of(keys(claim))}, {}),
        "sweep": ({"over": keys({"key": text, "label": text}), "cost": text}, {}),
    }
    required, optional = told.get(entry["kind"], ({}, dict.fromkeys(entry, anything)))
    return required, optional | every


def _side(model: Check) -> Check:
    """One side of an order: a model, or the token that is read."""
    return either(dict, keys({"part": null_or(one_of(TOKENS))}), model)


@cache
def _sets() -> list[str]:
    """The robustness sets."""
    content = yaml.safe_load(configs.find("data/robustness.yaml").read_text(encoding="utf-8"))
    return list(content["data"]["init_args"]["sets"])


def _published(entry: Mapping[str, Any], fields: Mapping[str, Check]) -> Check:
    """One number of the paper, or several ``by`` a field that tells them apart."""
    models, parts = entry["models"], entry.get("parts")
    compared = "imagenet" if "imagenet" in models else next(iter(models), None)  # numbers stand beside these
    required = {"model": one_of(models.get(compared, [])), "source": text}
    if parts is not None:
        required["part"] = one_of(parts.get(compared, {}))
    sizes = keys(dict.fromkeys(("width", "backbone", "head"), number(0)))
    optional = {"inferred": flag, "note": text, "sizes": sizes, **fields}

    def check(value: Any, key: str) -> None:
        if isinstance(value, Mapping) and "by" in value:
            keys(required | {"by": one_of(fields), "values": anything}, optional | {"notes": anything})(value, key)
            by(fields[value["by"]], PERCENT)(value["values"], f"{key}.values")
            by(_any_of(value["values"]), text)(value.get("notes", {}), f"{key}.notes")
        else:
            keys(required | {"value": PERCENT}, optional)(value, key)

    return check


def _any_of(values: Mapping[Any, Any]) -> Check:
    """A key of ``values``, which need be no text."""

    def check(value: Any, key: str) -> None:
        if value not in values:
            refuse(key, value, ", ".join(map(str, values)))

    return check


def _check_numbers(published: list[dict[str, Any]], key: str) -> None:
    """ValueError where one source gives two numbers of one thing."""
    seen = []
    for found in read_published(published):
        thing = found.model, found.part, found.source, found.fields
        if thing in seen:
            fields = ", ".join(f"{name}: {value}" for name, value in found.fields.items())
            raise ValueError(f"{key}: {found.model}, {fields}: two numbers of {found.source}; allowed: one")
        seen.append(thing)
