"""Which runs targets are made of, with their commands, what they need, and their order."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import yaml

import configs
from analysis.targets import Target
from experiments import spec
from experiments.runs import RunSpec, in_order

DEMO_DATA = RunSpec(
    "demo", "demo", (), ("--out", "data/demo", "--overwrite", "true", "--workers", "2"), Path("data/demo"),
    program="datamodules.prepare", marker="_info.json", log=None,
    sources=tuple(configs.ROOT.parent / "datamodules" / name for name in ("demo.py", "prepare.py")),
)  # fmt: skip
"""Draws the embedded data set."""
DEMO_ROBUSTNESS = RunSpec(
    "demo_robustness", "demo_robustness", (), ("--out", "data/demo/robustness"), Path("data/demo/robustness"),
    needs=(DEMO_DATA,), program="datamodules.prepare", marker="real.json", log=None,
)  # fmt: skip
"""Draws its robustness sets."""
DEMO_DENSE = RunSpec(
    "demo_dense", "demo_dense", (), ("--out", "data/demo_dense", "--overwrite", "true"), Path("data/demo_dense"),
    program="datamodules.prepare", marker="detection/_info.json", log=None,
    sources=tuple(configs.ROOT.parent / "datamodules" / name for name in
                  ("demo.py", "prepare_dense.py", "prepare_coco.py", "instance_annotations.py")),
)  # fmt: skip
"""Draws the embedded scenes for dense tasks."""
DEMO_SETS = {"robustness": DEMO_ROBUSTNESS, "label_maps": DEMO_DENSE, "objects": DEMO_DENSE}
"""What draws what a task reads, where that is not the embedded data set itself."""

OWN = {
    "--seed_everything": "say SEED (--seed)",
    "--trainer.logger.init_args.save_dir": "say RUNS (--runs)",
    "--trainer.logger.init_args.name": "it is MODEL-TASK",
}
"""Flags that every run is given, and what to say in their place."""


@dataclass(frozen=True)
class Settings:
    """What the user asked for.

    Args:
        data: imagenet or demo; None takes the target's own.
        models: overlays in configs/backbone in place of the target's models.
        checkpoint: weights of the one model in ``models``; for ``evaluate``, the checkpoint of a probe.
        runs: folder of the runs; None takes the target's own.
        roots: YAML in configs/data -> folder of the data.
        seed: of every run; None is 0.
        args: flags added to every run.
        threads: of every run; None is one for embedded data, and 0, the environment's, else.
    """

    data: str | None = None
    models: tuple[str, ...] = ()
    checkpoint: str | None = None
    runs: Path | None = None
    roots: Mapping[str, str] = field(default_factory=dict)
    seed: int | None = None
    args: tuple[str, ...] = ()
    threads: int | None = None


def targets(names: Sequence[str], settings: Settings) -> list[Target]:
    """The targets behind names, on the data and of the models asked for.

    Raises:
        ValueError: a model has no overlay; or something is given that a target, or any run, does not take.
    """
    for model in settings.models:
        if not configs.find(f"backbone/{spec.model(model).backbone}.yaml").is_file():
            known = ", ".join(configs.names("backbone"))
            raise ValueError(f"models={model}: there is no backbone/{model}.yaml; there are {known}")
    for word in settings.args:
        if (flag := word.partition("=")[0]) in OWN:
            raise ValueError(f"args={word}: every run has a {flag} of its own: {OWN[flag]}")
    if twice := [model for model in settings.models if settings.models.count(model) > 1]:
        raise ValueError(f"models={' '.join(settings.models)}: {twice[0]} is there twice")
    data = settings.data or ("imagenet" if settings.roots else None)
    if data == "demo" and settings.roots:
        given = ", ".join(f"{name}={root}" for name, root in settings.roots.items())
        raise ValueError(f"data=demo is embedded and takes no folder: {given}; leave it out, or data=imagenet")
    found = spec.targets(names, data, settings.models)
    for target in found:
        _check_taken(target, settings, asked_data=data)
    return found


def _check_taken(target: Target, settings: Settings, asked_data: str | None) -> None:
    """ValueError for models, a checkpoint or a seed that the target does not take."""
    name, checkpoint = target.name, settings.checkpoint
    if (seeds := target.seeds) is not None and settings.seed is not None:
        raise ValueError(f"{name}: seed={settings.seed}: it has seeds of its own, {', '.join(map(str, seeds))}")
    if settings.models and target.kind == "sweep":
        varied, own = target.options["over"]["key"], " ".join(spec.target(name, target.data).models)
        given = " ".join(settings.models)
        raise ValueError(f"{name}: models={given}: it varies {varied} of models of its own, {own}, and takes no others")
    if checkpoint is None:
        return
    given = f"{name}: checkpoint={checkpoint}"
    if any(spec.task(task).tests_probe for task in target.tasks):
        if asked_data is None:
            raise ValueError(f"{given}: say what it is tested on, data: {', '.join(spec.datasets())}")
    elif target.kind in ("demo", "sweep") or target.seeds is not None:
        raise ValueError(f"{given}: it pretrains its models, and takes no CHECKPOINT (--checkpoint)")
    elif not settings.models:
        raise ValueError(
            f"{given}: say whose weights they are: CHECKPOINT (--checkpoint) goes with one overlay of configs/backbone "
            "as MODELS (--models)"
        )
    if len(target.models) > 1 and settings.models:
        many = " ".join(settings.models)
        raise ValueError(f"{given}: models={many}: a checkpoint is of one model: MODELS (--models) names that one")
    for model in settings.models:
        if spec.model(model).method is None:
            raise ValueError(
                f"models={model} is measured as it was initialised, without checkpoint={checkpoint}: "
                f"models={spec.model(model).backbone} takes it"
            )


def runs_folder(target: Target, settings: Settings) -> Path:
    """Where a target's runs lie and its files go."""
    if settings.runs is not None:
        return settings.runs
    folder = target.options.get("default_runs", {})
    folder = folder.get(target.data, f"paper-{target.data}") if isinstance(folder, dict) else folder
    return Path("runs") / (f"{folder}-{settings.seed}" if target.kind == "demo" and settings.seed else folder)


def plan(names: Sequence[str], settings: Settings) -> list[RunSpec]:
    """All runs that targets need, each once and after what it needs."""
    return in_order(requested(names, settings))


def requested(names: Sequence[str], settings: Settings) -> list[RunSpec]:
    """The runs that targets are drawn from, without what those need; each once."""
    found = [run for target in targets(names, settings) for run in _runs(target, settings)]
    return list(dict.fromkeys(found))


def _runs(target: Target, settings: Settings) -> list[RunSpec]:
    """One target's own runs: its tasks of its models, for each seed."""
    folder = runs_folder(target, settings)
    if target.kind == "demo":
        return _Planner(target, settings, folder, settings.seed or 0).before_and_after()
    planners = [
        _Planner(target, settings, where, (settings.seed or 0) if seed is None else seed)
        for seed, where in target.folders(folder).items()
    ]
    return [p.run(model, task) for p in planners for task in target.tasks for model in target.models]


@dataclass(frozen=True)
class _Planner:
    """Makes a target's runs in a folder, with a seed."""

    target: Target
    settings: Settings
    folder: Path
    seed: int

    @property
    def demo(self) -> bool:
        """Whether it is made of the embedded data."""
        return self.target.data == "demo"

    def run(self, model: str, name: str) -> RunSpec:
        """MODEL-TASK with the files that are written for it, and its weights."""
        task = spec.task(name)
        if task.tests_probe is not None:
            return self._test(model, task, task.tests_probe)
        if task.prints_config:
            return replace(self._spec(f"{model}-{name}", model, task, ["--print_config"], log="config.yaml"), needs=())
        flags, needs, lacks = [], [], ""
        published = _existing(f"paper/{self.target.data}/{model}-weights.yaml")
        weights, method = self.settings.checkpoint, spec.model(model).method
        if weights is None and self.demo and method is not None:
            needs.append(self.pretrain(model, method))
            weights = _checkpoint(needs[-1])
        if weights is not None:
            flags += ["--model.init_args.backbone_weights", weights]
        elif method is not None and not published and not _is_pretrained(model):
            lacks = (
                f"no weights for {model}: give CHECKPOINT=path with MODELS={model} (--checkpoint, --models), or write "
                f"configs/paper/{self.target.data}/{model}-weights.yaml"
            )
        if task.needs_probe is not None:
            needs.append(self.run(model, task.needs_probe))
            flags += ["--model.init_args.probe", _checkpoint(needs[-1])]
        return self._spec(f"{model}-{name}", model, task, flags, needs, published, lacks=lacks)

    def _test(self, model: str, task: spec.Task, probe: str) -> RunSpec:
        """The final evaluation of a probe: the one that was given, or MODEL-PROBE."""
        needs = [] if self.settings.checkpoint is not None else [self.run(model, probe)]
        flags = ["--ckpt_path", self.settings.checkpoint or _checkpoint(needs[0])]
        return self._spec(f"{model}-{task.name}", model, task, flags, needs)

    def pretrain(self, model: str, method: str) -> RunSpec:
        """MODEL-pretrain by the model's method."""
        return self._spec(f"{model}-pretrain", model, spec.pretraining(method))

    def before_and_after(self) -> list[RunSpec]:
        """The demo's evaluations of a model as it was initialised and as it was pretrained."""
        if len(self.target.models) != 1:
            raise ValueError(f"{self.target.name}: models={' '.join(self.target.models)}: name one model")
        model = self.target.models[0]
        if (method := spec.model(model).method) is None:
            raise ValueError(f"{self.target.name}: models={model} is not pretrained: {spec.model(model).backbone} is")
        # what people watch: it shows its progress, and has the machine for itself, so everything else comes after it
        pretrain = self._spec("pretrain", model, spec.pretraining(method), log=None)
        pretrain = replace(pretrain, threads=self.settings.threads or 0)
        weights = {"untrained": [], "pretrained": ["--model.init_args.backbone_weights", _checkpoint(pretrain)]}
        return [
            self._spec(f"{state}-{task.name}", model, task, flags, [pretrain])
            for state, flags in weights.items()
            for task in map(spec.task, self.target.tasks)
        ]

    def _sources(self, flags: Sequence[str]) -> tuple[Path, ...]:
        """The checkpoint that was given, where the run takes it and it is a file."""
        given = self.settings.checkpoint
        return (Path(given).expanduser(),) if given in flags and given and Path(given).expanduser().is_file() else ()

    def _data(self, task: spec.Task) -> str:
        """The YAML in configs/data that holds what a task reads."""
        return spec.content()["data"][self.target.data][task.data]

    def _files(self, model: str, task: spec.Task) -> list[str]:
        """Base, task, data and backbone; then, where they are there, files for the demo, the task and the run."""
        backbone = spec.model(model).backbone
        files = ["base.yaml", f"task/{task.config}.yaml", f"data/{self._data(task)}.yaml", f"backbone/{backbone}.yaml"]
        if self.demo:
            files.append(f"task/{task.config}_demo.yaml")
        wanted = self.target.options.get("overlays", True)
        if task.overlay in wanted if isinstance(wanted, list) else wanted:
            for name in dict.fromkeys((task.overlay, f"{backbone}-{task.overlay}", f"{model}-{task.overlay}")):
                files += _existing(f"paper/{self.target.data}/{name}.yaml")
        return files

    def _spec(
        self, name: str, model: str, task: spec.Task, flags: Sequence[str] = (), needs: Sequence[RunSpec] = (),
        published: Sequence[str] = (), log: str | None = "log.txt", lacks: str = "",
    ) -> RunSpec:  # fmt: skip
        """The run with the files and flags of its model and task, and the embedded data among what it needs.

        ``flags`` and the files of published weights come after all others.
        """
        data = [DEMO_SETS.get(task.data, DEMO_DATA)] if self.demo else []
        threads = int(self.demo) if self.settings.threads is None else self.settings.threads
        logger = "--trainer.logger.init_args"
        every = ["--seed_everything", str(self.seed), f"{logger}.save_dir", str(self.folder), f"{logger}.name", name]
        if (root := self.settings.roots.get(self._data(task))) is not None:
            every += ["--data.init_args.root", root]
        return RunSpec(
            name, task.verb, (*self._files(model, task), *published),
            (*every, *_changes(model, task), *flags, *self.settings.args), self.folder / name,
            needs=(*data, *needs), threads=threads, log=log, lacks=lacks, sources=self._sources(flags),
        )  # fmt: skip


def _checkpoint(run: RunSpec) -> str:
    return str(run.folder / "checkpoints" / "last.ckpt")


def _changes(model: str, task: spec.Task) -> list[str]:
    """Flags for what a model changes of its overlay, and of the data where it has a side of its own."""
    entry = spec.model(model)
    changes = {f"model.init_args.backbone.init_args.{key}": value for key, value in entry.changes.items()}
    if (side := entry.side) is not None:
        sides = {"resize": side, "crop": side} | ({"probe_size": side} if task.data == "images" else {})
        if task.name == "pretrain":
            sides |= {"multicrop.global_size": side, "multicrop.local_size": side // 2}
        changes |= {"model.init_args.backbone.init_args.img_size": side}
        changes |= {f"data.init_args.{key}": value for key, value in sides.items()}
    return [word for key, value in changes.items() for word in (f"--{key}", str(value))]


def _existing(name: str) -> list[str]:
    """The file's name in a list, which is empty where there is none."""
    return [name] if configs.find(name).is_file() else []


def _is_pretrained(model: str) -> bool:
    """Whether a model's backbone overlay brings its own weights."""
    content = yaml.safe_load(configs.find(f"backbone/{spec.model(model).backbone}.yaml").read_text(encoding="utf-8"))
    return bool(content["model"]["init_args"]["backbone"]["init_args"].get("pretrained"))
