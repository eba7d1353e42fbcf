"""One model of each of timm's families through everything that a backbone is used for here, with random weights.

``python benchmarks/timm_sweep.py`` writes results/timm_sweep.md; families named behind it are run alone, without the
table. What is done stands in ``--state``, a file of JSON lines, so that an interrupted sweep goes on.
"""

import argparse
import copy
import json
import logging
import subprocess
import sys
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import timm
import torch
from lightning.pytorch import Trainer
from measuring import report
from torch import Tensor
from torch.utils.data import DataLoader

from backbones import TimmModel, weights
from backbones.timm_create import own_size
from lightning_modules import DINO, KNN, BinaryAUCEvaluation, HeadSpec, LinearProbe
from metrics import binary_auc

_MODELS = """
beit=beit_base_patch16_224 byoanet=halonet_h1 byobnet=test_byobnet cait=cait_xxs24_224 coat=coat_tiny
convit=convit_tiny convmixer=convmixer_768_32 convnext=test_convnext cpubone=cpubone_nano
crossvit=crossvit_tiny_240 csatv2=csatv2 cspnet=cs3darknet_focus_s cspnext=cspnext_tiny davit=davit_tiny
deit=deit_tiny_patch16_224 densenet=densenet121 dla=dla46x_c dpn=dpn48b
edgenext=edgenext_xx_small efficientformer=efficientformer_l1 efficientformer_v2=efficientformerv2_s0
efficientnet=test_efficientnet efficientvim=efficientvim_m1 efficientvit_mit=efficientvit_b0
efficientvit_msra=efficientvit_m0 eva=vit_tiny_patch16_dinov3_qkvb fasternet=fasternet_t0 fastvit=fastvit_t8
focalnet=focalnet_tiny_srf gcvit=gcvit_xxtiny gemma4_vit=gemma4_vit_167m ghostnet=ghostnet_050
hardcorenas=hardcorenas_b hgnet=hgnetv2_b0 hiera=hiera_tiny_224 hieradet_sam2=sam2_hiera_tiny
hrnet=hrnet_w18_small iformer=iformer_t inception_next=inception_next_atto
inception_resnet_v2=inception_resnet_v2 inception_v3=inception_v3 inception_v4=inception_v4
lcnetv2=lcnetv2_small levit=levit_128s lowformer=lowformer_b0 mambaout=test_mambaout maxxvit=test_coatnet
metaformer=poolformerv2_s12 mlp_mixer=gmlp_ti16_224 mobilenetv3=lcnet_035 mobilenetv5=mobilenetv5_base
mobilevit=mobilevit_xxs mvitv2=mvitv2_tiny naflexvit=naflexvit_base_patch16_parfac_gap nasnet=nasnetalarge
nest=nest_tiny nextvit=nextvit_small nfnet=test_nfnet pit=pit_ti_224 pnasnet=pnasnet5large pvt_v2=pvt_v2_b0
qwen3_vit=qwen3_vit_88m rdnet=rdnet_tiny regnet=regnetx_002 repghost=repghostnet_050 repvit=repvit_m1
res2net=res2next50 resnest=resnest14d resnet=test_resnet resnetv2=resnetv2_18 rexnet=rexnet_100
selecsls=selecsls42 senet=legacy_seresnet18 sequencer=sequencer2d_s shvit=shvit_s1 sknet=skresnet18
starnet=starnet_s050 swiftformer=swiftformer_xs swin_transformer=swin_tiny_patch4_window7_224
swin_transformer_v2=swinv2_tiny_window8_256 swin_transformer_v2_cr=swinv2_cr_tiny_224 tiny_vit=tiny_vit_5m_224
tnt=tnt_s_legacy_patch16_224 tresnet=tresnet_m twins=twins_svt_small vgg=vgg11 visformer=visformer_tiny
vision_transformer=test_vit vision_transformer_hybrid=vit_tiny_r_s16_p8_224
vision_transformer_relpos=test_vit_relpos vision_transformer_sam=samvit_base_patch16_224
vitamin=vitamin_small_224 volo=volo_d1_224 vovnet=ese_vovnet19b_slim_dw xception=legacy_xception
xception_aligned=xception41p xcit=xcit_nano_12_p8_224 deepseek_vit=deepseek_vit_412m
"""
MODELS = dict(pair.split("=") for pair in _MODELS.split())
"""timm's modules, and the smallest model of each."""
SIZES = (64, 96, 128, 160)
"""That are tried before a model's own."""
LOCAL = (32, 96, 128, 192)
"""Of the local crops, where a model takes one of them beside its own."""


def check_family(name: str) -> dict[str, Any]:
    """Runs a model of timm's. Whatever is not as it should be is an AssertionError or whatever was raised.

    Returns:
        ``size`` and ``local`` of the images, whether ``img_size`` set it, the embedding's ``width``, and ``notes``.
    """
    torch.manual_seed(0)
    model, size, by_option = smallest(name)
    local = next((s for s in LOCAL if s != size and takes(model, s)), size)
    found = {"size": size, "local": local, "by_option": by_option, "width": model.num_features}
    images = torch.randn(2, 3, size, size)
    trained = copy.deepcopy(model)  # the evaluations freeze theirs
    notes = [*check_features(model.eval(), images), *check_evaluations(model, images)]
    notes += ["one size"] if local == size else []
    check_weights(model, name, size if by_option else None, images)
    notes += check_dino_step(trained, size, local)
    return found | {"notes": notes}


def smallest(name: str) -> tuple[TimmModel, int, bool]:
    """A model for the smallest size that it takes, set by ``img_size`` where it needs that."""
    plain = TimmModel(name)
    own = own_size(plain.model)[0]
    for size in (*(s for s in SIZES if s < own), own):
        if takes(plain, size):
            return plain, size, False
        try:
            built = TimmModel(name, img_size=size)
        except ValueError:  # one of ours names the option; anything else ends the check
            continue
        if takes(built, size):
            return built, size, True
    raise AssertionError(f"takes no image, not even of its own {own} x {own}")


def takes(model: TimmModel, size: int) -> bool:
    """Whether images of a size have an embedding; a refusal must be ours and name model and size."""
    return refused_size(model.eval(), size) is None


@torch.no_grad()
def refused_size(model: TimmModel, size: int) -> str | None:
    try:
        model(torch.zeros(1, 3, size, size))
    except ValueError as error:
        assert f"timm's {model.name} does not take" in str(error), error
        return str(error)
    return None


@torch.no_grad()
def check_features(model: TimmModel, images: Tensor) -> list[str]:
    """The embedding is timm's own and num_features wide; maps are as feature_info says."""
    embedding = model.embedding(images)
    assert embedding.shape == (2, model.num_features), f"embedding {tuple(embedding.shape)}, {model.num_features=}"
    own = model.model.forward_head(model.model.forward_features(images), pre_logits=True)
    torch.testing.assert_close(embedding, own)
    every, notes = model.forward_intermediates(images, model.depth), []
    for info, features in zip(model.feature_info, every, strict=True):
        assert features.patches.shape[:2] == features.cls.shape == (2, info["num_chs"])
        cells = images.shape[-1] / info["reduction"]
        if not all(cells - 1 < side < cells + 1 for side in features.patches.shape[-2:]):
            notes.append("maps are not of feature_info's reduction")
    return sorted({*notes})


@torch.no_grad()
def check_evaluations(model: TimmModel, images: Tensor) -> list[str]:
    """Probe, k-NN and Binary-AUC; the probe's cls is k-NN's embedding, unless it is a class token of its own."""
    deep = min(2, model.depth)
    specs = [HeadSpec(n, pooling) for n in sorted({1, deep}) for pooling in ("cls", "mean", "max", "cls+mean")]
    probe = LinearProbe(model, specs, num_classes=5)
    logits = probe.logits(probe.encode(images))
    assert all(y.shape == (2, 5) and y.isfinite().all() for y in logits)
    embedding = KNN(model)(images)
    assert embedding.isfinite().all()
    read = LinearProbe(model, [HeadSpec(1, "cls")], num_classes=5).encode(images)
    if model.embedding_is_cls:
        torch.testing.assert_close(read, embedding)
    for maps in BinaryAUCEvaluation(model, blocks="all").named_maps(images).values():
        masks = torch.zeros(images.shape[0], *images.shape[-2:], dtype=torch.int32)
        masks[:, : images.shape[-2] // 2] = 1
        auc = binary_auc(maps[:, None], masks)
        assert auc.shape == (2, 1) and (maps.shape[-2] < 2 or auc.isfinite().all())
    return [] if model.embedding_is_cls else ["class token beside a pooled embedding"]


@torch.no_grad()
def check_weights(model: TimmModel, name: str, img_size: int | None, images: Tensor) -> None:
    """An export loads into a model of its own, to the same embedding."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights.safetensors"
        weights.export(model, path)
        again = TimmModel(name, img_size=img_size).eval()
        weights.load(again, path)
    torch.testing.assert_close(again(images), model(images))


class _Recorded(DINO):
    """DINO that keeps its loss and the names of the backbone's parameters without a gradient."""

    silent: set[str]
    last_loss: float

    def on_after_backward(self) -> None:
        self.silent = {k for k, p in self.student.backbone.named_parameters() if p.requires_grad and p.grad is None}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.last_loss = outputs["loss"].item()


def check_dino_step(model: TimmModel, size: int, local: int) -> list[str]:
    """Two global and two local crops; gradients wherever timm's own model has them."""
    model.train()
    model(torch.randn(2, 3, size, size)).sum().backward()
    wanted = {k for k, p in model.named_parameters() if p.grad is None}
    model.zero_grad(set_to_none=True)
    module = _Recorded(
        model, out_dim=32, hidden_dim=32, bottleneck_dim=16, global_batch_size=2, warmup_epochs=0, knn_k=5
    )
    trainer = Trainer(
        max_steps=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    crops = [torch.randn(2, 3, s, s) for s in (size, size, local, local)]
    trainer.fit(module, DataLoader([{"crops": crops}], batch_size=None))
    assert torch.tensor(module.last_loss).isfinite(), f"loss {module.last_loss}"
    assert module.silent <= wanted, f"no gradient at {sorted(module.silent - wanted)[:3]}"
    return [f"{len(wanted)} parameters without gradient in timm too"] if wanted else []


def one_family(family: str) -> dict[str, Any]:
    """A line of the table; never raises."""
    name, start = MODELS[family], time.perf_counter()
    row: dict[str, Any] = {"family": family, "model": name}
    try:
        row |= {"runs": True} | check_family(name)
    except Exception as error:  # whatever it is, it is the cause
        lines = str(error).strip().splitlines()
        row |= {"runs": False, "cause": f"{type(error).__name__}: {lines[0] if lines else ''}"}
    return row | {"seconds": round(time.perf_counter() - start, 1)}


def in_a_process(family: str, limit: float) -> dict[str, Any]:
    """:func:`one_family` with its own memory, so that its end is not the sweep's."""
    command = [sys.executable, __file__, family]
    no = {"family": family, "model": MODELS[family], "runs": False}
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit)
    except subprocess.TimeoutExpired:
        return no | {"cause": f"not done in {limit:.0f} s"}
    last = run.stdout.strip().splitlines()[-1:] or [""]
    try:
        return json.loads(last[0])
    except json.JSONDecodeError:
        cause = f"the process ended with {run.returncode}: {(run.stderr.strip().splitlines() or [''])[-1]}"
        return no | {"cause": cause}


def table(rows: list[dict[str, Any]]) -> None:
    lines = []
    for row in sorted(rows, key=lambda row: (row["runs"], row["family"])):
        sizes = f"{row['size']}, {row['local']}{' (img_size)' if row['by_option'] else ''}" if row["runs"] else ""
        said = ", ".join(row["notes"]) if row["runs"] else row["cause"].replace("|", "/")
        lines.append(
            [row["family"], row["model"], "runs" if row["runs"] else "**no**", sizes, str(row.get("width", "")), said]
        )
    running = sum(row["runs"] for row in rows)
    note = (
        f"{running} of {len(rows)} families run, timm {timm.__version__}. Each: a DINO step of two global and two "
        "local crops with gradients wherever timm's own model has them; probe heads on cls, mean, max, cls+mean; k-NN; "
        "Binary-AUC of every stage; widths and maps as `feature_info` says; the embedding as timm's "
        '`forward_head(pre_logits=True)`; an export loaded again. "one size": local crops must be as large as global '
        "ones, a ValueError says so."
    )
    report("timm_sweep", ["family", "model", "", "global, local crops", "embedding", "notes, or why not"], lines, note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", help="these alone, a JSON line each")
    parser.add_argument("--state", type=Path, default=Path("timm_sweep.jsonl"), help="what is done already")
    parser.add_argument("--jobs", type=int, default=1, help="families at a time")
    parser.add_argument("--limit", type=float, default=240, help="seconds for a family")
    args = parser.parse_args()
    if args.families:
        warnings.filterwarnings("ignore")
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        torch.set_num_threads(1)
        for family in args.families:
            print(json.dumps(one_family(family)), flush=True)
        return
    rows = (
        [json.loads(line) for line in args.state.read_text(encoding="utf-8").splitlines()]
        if args.state.exists()
        else []
    )
    left = [family for family in MODELS if family not in {row["family"] for row in rows}]
    with ThreadPoolExecutor(args.jobs) as pool:
        for done in as_completed([pool.submit(in_a_process, family, args.limit) for family in left]):
            rows.append(row := done.result())
            with args.state.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)
    ours = {name.rpartition(".")[2] for name in sys.modules if name.startswith("backbones.")}
    if unknown := sorted({*timm.list_modules()} - MODELS.keys() - ours):
        rows += [{"family": f, "model": "", "runs": False, "cause": "not in the sweep's list"} for f in unknown]
    table(rows)


if __name__ == "__main__":
    main()
