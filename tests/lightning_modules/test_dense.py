"""What dense tasks share: schedules, rates by layer, taps, and what is left out of training."""

import pytest
import torch
from torch.optim.lr_scheduler import LinearLR, PolynomialLR, SequentialLR

from backbones import LinearVisionTransformer, MambaReg, TimmModel, VisionMamba, VisionTransformer
from lightning_modules import SemanticSegmentation
from lightning_modules.dense import default_taps
from lightning_modules.schedules import poly_schedule, step_schedule, warmed_up
from metrics import segmentation_scores

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 4}
FAMILIES = {
    "vit": lambda: VisionTransformer(**SMALL, num_heads=2),
    "linear_vit": lambda: LinearVisionTransformer(**SMALL, num_heads=2),
    "vim": lambda: VisionMamba(**SMALL, d_state=4, headdim=8),
    "mambar": lambda: MambaReg(**SMALL, d_state=4, headdim=8, num_registers=2),
    "timm": lambda: TimmModel("test_vit", img_size=32),
    "pyramid": lambda: TimmModel("test_resnet"),
}


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    """Tiny tensors."""


def build(family, **options):
    torch.manual_seed(0)
    options = {"num_classes": 5, "channels": 8, "aux_channels": 4, "neck_channels": 12} | options
    return SemanticSegmentation(FAMILIES[family](), **options)


def test_poly_is_torchs_sequence_of_linear_and_polynomial():
    warmup, total, peak = 7, 40, 0.3
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    parts = [
        LinearLR(optimizer, 1e-3, total_iters=warmup - 1),
        PolynomialLR(optimizer, total_iters=total - warmup - 1, power=0.9),
    ]
    schedule = SequentialLR(optimizer, parts, [warmup])
    for step in range(total):
        ours = warmed_up(step, peak, warmup, 1e-3)
        ours = poly_schedule(step, total, peak, warmup, 0.9) if ours is None else ours
        assert ours == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-6, abs=1e-12), step
        optimizer.step()
        schedule.step()


def test_steps_fall_at_milestones():
    assert [step_schedule(p, 1.0, [8, 11]) for p in (0, 7.99, 8, 10.9, 11)] == pytest.approx([1, 1, 0.1, 0.1, 0.01])


@pytest.mark.parametrize("family", FAMILIES)
def test_rates_by_layer_are_those_of_BEiT(family):
    model = build(family, layer_decay=0.5, lr=1.0)
    depth = model.backbone.depth
    scale = {
        id(p): g["lr_scale"] for g in model.configure_optimizers().param_groups for p in g["params"] if "lr_scale" in g
    }
    names = [info["module"] for info in model.backbone.feature_info]
    for name, parameter in model.backbone.named_parameters():
        block = next((i for i, prefix in enumerate(names) if name.startswith(f"{prefix}.")), None)
        if block is not None:
            assert scale[id(parameter)] == pytest.approx(0.5 ** (depth - block)), name
    assert all(id(p) not in scale for p in model.decode_head.parameters())


@pytest.mark.parametrize("family", ["vit", "vim", "mambar"])
@pytest.mark.parametrize("taps", [None, [0, 1, 2, 3]])
def test_every_trained_parameter_gets_a_gradient(family, taps):
    model = build(family, taps=taps)
    _train_once(model)
    assert not [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]


@pytest.mark.parametrize("family", ["vit", "vim"])
def test_blocks_behind_the_last_tap_are_left_out(family):
    model = build(family, taps=[0, 1], head="linear")
    unused = model._unused()
    for name in unused:
        model.backbone.get_parameter(name).requires_grad_(False)
    blocks = {name.split(".")[1] for name in unused if name.split(".")[0] in ("blocks", "layers")}
    assert blocks == {"2", "3"}
    _train_once(model)
    assert not [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]


def _train_once(model):
    torch.manual_seed(1)
    batch = {"image": torch.randn(2, 3, 64, 64), "target": torch.randint(0, 5, (2, 64, 64))}
    loss, _ = model.training_loss(batch)
    loss.backward()
    return loss


def test_a_frozen_backbone_stays_in_eval_mode_and_without_gradients():
    model = build("vit", frozen=True).train()
    assert not model.backbone.training and model.decode_head.training
    _train_once(model)
    assert all(p.grad is None for p in model.backbone.parameters())
    trained = {id(p) for g in model.configure_optimizers().param_groups for p in g["params"]}
    assert not trained & {id(p) for p in model.backbone.parameters()}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("inference", ["whole", "slide"])
def test_images_of_any_size_are_segmented_at_their_size(family, inference):
    model = build(family, inference=inference, window=(32, 32), window_stride=(24, 24)).eval()
    with torch.no_grad():
        assert model(torch.randn(1, 3, 45, 70)).shape == (1, 5, 45, 70)


def test_taps():
    assert default_taps(12) == (3, 5, 7, 11) and default_taps(24) == (5, 11, 17, 23)
    assert default_taps(4) == (0, 1, 2, 3) and default_taps(32) == (7, 15, 23, 31)
    with pytest.raises(ValueError, match="taps=null: the backbone has 3 blocks"):
        default_taps(3)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"neck": "fpn"}, "neck='fpn': the backbone's maps are all of one size; allowed for such: multilevel"),
        ({"neck": "none"}, "neck='none'; allowed: identity, fpn"),
        ({"taps": [0, 1]}, "takes 4 maps, found 2"),
        ({"taps": [4]}, "has blocks 0..3"),
        ({"head": "linear2"}, "head='linear2'; allowed: upernet, linear"),
        ({"aux_index": 4}, "aux_index=4; the neck gives levels 0..3"),
        ({"schedule": "cosine"}, "schedule='cosine'; allowed: poly, steps"),
        ({"stream": "x"}, "stream='x'; allowed"),
    ],
)
def test_wrong_options_are_named(options, said):
    with pytest.raises(ValueError, match=said.replace("[", r"\[").replace(".", r"\.")):
        build("vit", **options)


def test_a_model_learns_the_classes_of_a_few_images():
    model = build("vit", lr=5e-3, dropout=0.0, channels=16)
    torch.manual_seed(2)
    images = torch.randn(4, 3, 32, 32)
    target = torch.zeros(4, 32, 32, dtype=torch.long)
    target[:, 8:24, 8:24] = torch.arange(1, 5)[:, None, None]
    images[:, :, 8:24, 8:24] += 3 * torch.randn(4, 3, 1, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(250):
        optimizer.param_groups[0]["lr"] = 5e-3 * (1 - step / 250)
        optimizer.zero_grad()
        model.training_loss({"image": images, "target": target})[0].backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        model.scores.update(model(images).argmax(1), target)
    assert segmentation_scores(model.scores.areas)["mIoU"] > 0.9  # a cell of the finest level is two pixels
