"""Tells checkpoints of every format in use apart, and finds the backbone in them.

A source is a path, ``hf://owner/repo/file[@revision]``, or a timm model name with published weights. The formats:

====================  ==============================================================================================
``lightning``         this project's checkpoints: ``state_dict`` with ``teacher.backbone.*`` / ``backbone.*``
``dino``              Dino-Mamba's and DINO's full ones: ``teacher`` and ``student``, the latter under ``module.``
``supervised``        Vim, Mamba-Reg, DeiT: ``model``, with a classifier
``linear``            DINO's and Dino-Mamba's linear evaluation: ``state_dict`` with ``module.linear.*`` and no backbone
``flat``              one dict of tensors: DINO's and timm's backbones, exports, safetensors
``timm``              a timm model's published weights, by name
====================  ==============================================================================================

Networks may lie in dicts inside dicts (``{"model": {"state_dict": …}}``), and names may carry what held the model when
it was saved: ``_orig_mod.`` (torch.compile), ``module.`` (DDP), ``model.``, ``net.``, ``encoder.`` … (somebody's
Lightning module). :func:`unwrappings` takes these off one by one, until a backbone finds its own names.
"""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import timm
from torch import Tensor

from backbones.weight_files import read

logger = logging.getLogger(__name__)


class Checkpoint(NamedTuple):
    """What a source holds."""

    kind: str
    """The format found; see the module's table."""
    state: dict[str, Tensor]
    """The backbone's tensors with a classifier's, if any, under :data:`backbones.base.CLASSIFIER_PREFIXES`."""


def is_timm_name(source: str | Path) -> bool:
    """Whether a source is the name of a timm model, and no file."""
    name = str(source)
    return "/" not in name and not Path(name).expanduser().exists() and timm.is_model(name)


def no_published_weights(name: str, error: Exception) -> str:
    """In words, what to do where timm could not get a model's weights."""
    reason = str(error).splitlines()[0] if str(error) else "no message"
    return (
        f"timm has no published weights for {name} here ({type(error).__name__}: {reason}); without a network, give a "
        "file's path (model.init_args.backbone_weights)"
    )


def _strip(state: dict[str, Any], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}


def _is_state(value: object) -> bool:
    return isinstance(value, dict) and any(isinstance(t, Tensor) for t in value.values())


NETWORKS = (
    "model", "state_dict", "model_state_dict", "module", "net", "network", "weights", "params", "model_ema",
    "state_dict_ema", "ema",
)  # fmt: skip
"""Where checkpoints keep a network's tensors, the one that is taken first."""
AVERAGES = ("model_ema", "state_dict_ema", "ema")
"""Where they keep a moving average beside it."""
WRAPPERS = (
    "module", "model", "net", "network", "encoder", "backbone", "trunk", "_forward_module", "ema_model", "encoder_q",
    "base_encoder", "online_encoder", "visual",
)  # fmt: skip
"""What a model's tensors may be called under when something held the model, a head perhaps beside it."""
IN_BETWEEN = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""What torch.compile, FSDP and activation checkpointing put into names."""


def _networks(content: dict[str, Any], depth: int = 3) -> dict[str, dict[str, Tensor]]:
    """The dicts of tensors in a file's content by the keys that lead to them, joined by dots."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, value in content.items():
        if _is_state(value):
            found[name] = {k: v for k, v in value.items() if isinstance(v, Tensor)}
        elif isinstance(value, dict) and depth and (name in NETWORKS or depth < 3):
            found |= {f"{name}.{inner}": state for inner, state in _networks(value, depth - 1).items()}
    return found


def uncompiled(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without the names of ``IN_BETWEEN``."""
    for wrapper in IN_BETWEEN:
        state = {name.replace(wrapper, ""): value for name, value in state.items()}
    return state


def _without_module(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without what DDP puts in front, and the count that torch's AveragedModel keeps beside."""
    return {name.removeprefix("module."): value for name, value in state.items() if name != "n_averaged"}


def _of_network(state: dict[str, Tensor], key: str) -> dict[str, Tensor]:
    """Where names begin with a network's, ``teacher_backbone.`` or ``teacher.``: those of the one called ``key``."""
    for prefix in (f"{key}_backbone.", f"{key}."):
        if found := _strip(state, prefix):
            return found
    return state


def bare(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without the wrappers that all names share."""
    first = {name.partition(".")[0] for name in state}
    wrapper = next(iter(first)) if len(first) == 1 else ""
    return bare(_strip(state, f"{wrapper}.")) if wrapper in WRAPPERS else state


def unwrappings(state: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """The state as it is, then with one wrapper after another taken off its names."""
    yield state
    for wrapper in WRAPPERS:
        if inner := _strip(state, f"{wrapper}."):
            yield from unwrappings(inner)


def detect_format(content: dict[str, Any], key: str, source: str | Path) -> Checkpoint:
    """The format of a file's content and the tensors of the backbone in it.

    Args:
        content: as :func:`read` returns it.
        key: which network of a full checkpoint, ``teacher`` or ``student``.
        source: for messages.

    Raises:
        ValueError: where there is no backbone in it, saying what there is.
    """
    networks = _networks(content)
    if "pytorch-lightning_version" in content:
        state = uncompiled(networks.get("state_dict", {}))
        for prefix in (f"{key}.backbone.", "backbone."):
            if found := _strip(state, prefix):
                return Checkpoint("lightning", found)
        found = _of_network(state, key)
        if found is state and any(name.startswith(("teacher.", "student.")) for name in state):
            raise ValueError(
                f"{source} is a Lightning checkpoint without {key}.* or backbone.* tensors; say which network by "
                "weights_key"
            )
        averages = {name.partition(".")[0] for name in state} & {*AVERAGES} - {key}
        _tell_of_averages(source, sorted(averages))
        return Checkpoint("lightning", found)
    if key in networks:
        state = uncompiled(networks[key])
        state = _strip(state, "module.") or state
        return Checkpoint(
            "dino" if key in ("teacher", "student") else "supervised", _strip(state, "backbone.") or state
        )
    if "teacher" in networks or "student" in networks:
        raise ValueError(f"{source} has no network {key!r}; it holds {', '.join(networks)}: say which by weights_key")
    taken = [name for wanted in NETWORKS for name in networks if name.partition(".")[0] == wanted]
    if taken or len(networks) == 1:
        state = _without_module(uncompiled(networks[taken[0] if taken else next(iter(networks))]))
        if {name.rpartition("linear.")[2] for name in state} <= {"weight", "bias"}:
            raise ValueError(
                f"{source} is a linear classifier without a backbone: read it with backbones.weights.linear"
            )
        if taken and taken[0].partition(".")[0] not in AVERAGES:
            _tell_of_averages(source, [name for name in taken if name.partition(".")[0] in AVERAGES])
        return Checkpoint("supervised", _of_network(state, key))
    if networks:
        raise ValueError(f"{source} holds several networks: {', '.join(networks)}; say which by weights_key")
    if content and all(isinstance(v, Tensor) for v in content.values()):
        state = _without_module(uncompiled(content))
        return Checkpoint("flat", _strip(state, "backbone.") or _of_network(state, key))
    raise ValueError(f"{source}: unknown format with keys {', '.join(map(str, list(content)[:8]))}")


def _tell_of_averages(source: str | Path, names: list[str]) -> None:
    """What else there is, since evaluations elsewhere take the average."""
    if names:
        logger.warning("%s holds %s too: weights_key=%s takes it", source, ", ".join(names), names[0])


def open_checkpoint(source: str | Path, key: str = "teacher") -> Checkpoint:
    """:func:`detect_format` of a path, an ``hf://`` address, or a timm name.

    Args:
        source: see the module's first lines.
        key: which network of a full checkpoint, ``teacher`` or ``student``.
    """
    name = str(source)
    if is_timm_name(name):
        try:
            model = timm.create_model(name, pretrained=True)
        except Exception as error:
            raise ValueError(no_published_weights(name, error)) from None
        return Checkpoint("timm", dict(model.state_dict()))
    return detect_format(read(source), key, source)
