"""One contract, swept over all backbones."""

import math

import pytest
import timm
import torch
import torch.nn.functional as F

import backbones
from backbones import (
    LinearVisionTransformer,
    MambaReg,
    MambaRegMamba1,
    TimmModel,
    VimMamba1,
    VisionMamba,
    VisionTransformer,
    weights,
)
from backbones.tokens import register_positions, resample_pos_embed

FAMILIES = {
    "vit": lambda **k: VisionTransformer(
        **{"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 3, "num_heads": 3, **k}
    ),
    "vit_reg": lambda **k: VisionTransformer(
        **{"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 3, "num_heads": 3, "num_registers": 3, **k}
    ),
    "linear_vit": lambda **k: LinearVisionTransformer(
        **{"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 3, "num_heads": 3, **k}
    ),
    "vim": lambda **k: VisionMamba(
        **{"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 3, "d_state": 8, "headdim": 8, **k}
    ),
    "mambar": lambda **k: MambaReg(
        **{
            "img_size": 32,
            "patch_size": 8,
            "embed_dim": 16,
            "depth": 3,
            "d_state": 8,
            "headdim": 8,
            "num_registers": 3,
            **k,
        }
    ),
    "vim_mamba1": lambda **k: VimMamba1(
        **{"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 3, "d_state": 4, **k}
    ),
    "mambar_mamba1": lambda **k: MambaRegMamba1(
        **{"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 3, "d_state": 4, "num_registers": 3, **k}
    ),
    "timm": lambda **k: TimmModel("test_vit", **k),
}
REGISTERS = {"vit_reg": [1, 2, 3], "mambar": [4, 9, 14], "mambar_mamba1": [4, 9, 14]}  # among 16 patches
ALL = pytest.mark.parametrize("name", FAMILIES)
OURS = pytest.mark.parametrize("name", [n for n in FAMILIES if n != "timm"])


def build(name, **kwargs):
    torch.manual_seed(0)
    return FAMILIES[name](**kwargs).eval()


@ALL
@pytest.mark.parametrize("grid", [(4, 4), (2, 3), (5, 2), (7, 7), (3, 8)])
def test_shapes(name, grid):
    model = build(name)
    h, w = grid
    images = torch.randn(2, 3, h * model.patch_size, w * model.patch_size)
    assert model(images).shape == (2, model.embed_dim)
    features = model.forward_intermediates(images, 2)
    assert len(features) == 2
    for f in features:
        assert f.cls.shape == (2, model.embed_dim) and f.patches.shape == (2, model.embed_dim, h, w)
        assert f.registers is None or f.registers.shape == (2, 3, model.embed_dim)
    assert (features[0].registers is not None) == (name in REGISTERS)
    rows = model.cls_mixing(images)
    assert rows.ndim == 4 and rows.shape[0] == 2 and rows.shape[2:] == (h, w)
    assert model.token_mixing(images).shape[:2] == rows.shape[:2]


@ALL
def test_inspect_is_forward_intermediates(name):
    model = build(name)
    images = torch.randn(2, 3, 4 * model.patch_size, 3 * model.patch_size)
    views = model.inspect(images, (-1, 0))
    every = model.forward_intermediates(images, model.depth)
    for view, features in zip(views, (every[-1], every[0]), strict=True):
        torch.testing.assert_close(view.features.cls, features.cls, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(view.features.patches, features.patches, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(views[0].mixing.mean(1), model.cls_mixing(images), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(views[1].mixing.mean(1), model.cls_mixing(images, 0), atol=1e-6, rtol=1e-5)


@ALL
def test_rows_of_the_mixing_matrix_are_those_of_the_tokens_named(name):
    model = build(name)
    side = 4 * model.patch_size
    images = torch.randn(2, 3, side, side)
    view, M = model.inspect(images, (1,))[0], model.token_mixing(images, 1)
    registers = REGISTERS.get(name, [])
    readout = {"vim": [8], "vim_mamba1": [8]}.get(name, registers if name.startswith("mambar") else [0])
    others = sorted({*readout, *registers, *([0] if name == "vim" else [])})
    patches = [i for i in range(M.shape[-1]) if i not in others]
    for rows, tokens in ((view.mixing, readout), (view.register_mixing, registers)):
        if not tokens:
            assert rows is None
            continue
        wanted = M[:, :, tokens][..., patches].transpose(1, 2).unflatten(-1, (4, 4))
        torch.testing.assert_close(rows, wanted, atol=1e-6, rtol=1e-5)


@ALL
def test_gradients_reach_every_parameter(name):
    model = build(name).train()
    side = 4 * model.patch_size
    (model(torch.randn(2, 3, side, side)).square().sum()).backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all() and parameter.grad.abs().sum() > 0, key


@ALL
def test_errors(name):
    model = build(name)
    with pytest.raises(ValueError, match=r"n=9.*blocks"):
        model.forward_intermediates(torch.zeros(1, 3, 32, 32), 9)
    with pytest.raises(ValueError, match="block=77"):
        model.cls_mixing(torch.zeros(1, 3, 4 * model.patch_size, 4 * model.patch_size), 77)
    if name != "timm":
        with pytest.raises(ValueError, match="width 33 is not a multiple of patch_size 8"):
            model(torch.zeros(1, 3, 32, 33))


@OURS
def test_batch_rows_are_independent(name):
    model = build(name).double()
    images = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    torch.testing.assert_close(model(images)[1:2], model(images[1:2]), atol=1e-12, rtol=0)


@OURS
def test_float32_and_bf16_agree_with_float64(name):
    model = build(name)
    images = torch.randn(4, 3, 48, 32)
    exact = build(name).double()(images.double())
    assert (model(images).double() - exact).norm() / exact.norm() < 1e-5
    with torch.autocast("cpu", torch.bfloat16):
        low = model(images)
    assert (low.double() - exact).norm() / exact.norm() < 0.03


@OURS
def test_drop_path_acts_in_training_only(name):
    model = build(name, drop_path=0.9)
    images = torch.randn(16, 3, 32, 32)
    assert torch.equal(model(images), build(name)(images))
    model.train()
    assert not torch.equal(model(images), model(images))


@ALL
def test_gradient_checkpointing_changes_memory_only(name):
    """Blocks that drop paths drop the same ones when they are run again."""
    torch.manual_seed(0)
    model = FAMILIES[name](drop_path=0.5).train()
    images = torch.randn(3, 3, *((32, 32) if name != "timm" else (160, 160)))
    kept, gradients = {}, {}
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        torch.manual_seed(1)
        kept[enable] = 0

        def keep(tensor, enable=enable):
            kept[enable] += tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = model(images).square().sum()
        output.backward()
        gradients[enable] = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    for a, b in zip(gradients[False], gradients[True], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert kept[True] < 0.5 * kept[False]


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("vit_small_patch16_224", 21), ("vit_base_patch16_224", 85), ("linear_vit_base_patch16_224", 85),
        ("vim_tiny_patch16_224", 10), ("vim_small_patch16_224", 40), ("vim_base_patch16_224", 88),
        ("mambar_base_patch16_224", 88),
    ],
)  # fmt: skip
def test_parameters_of_table_1(name, millions):
    with torch.device("meta"):
        if name.startswith("vit"):
            size = {"small": dict(embed_dim=384, num_heads=6), "base": dict(embed_dim=768, num_heads=12)}
            model = VisionTransformer(**size[name.split("_")[1]])
        else:
            model = timm.create_model(name)
    assert math.floor(sum(p.numel() for p in model.parameters()) / 1e6) == millions


@pytest.mark.parametrize("name", ["vim", "mambar"])
def test_initialisation_of_the_mixer_survives(name):
    for block in build(name, depth=8).layers:
        for dt_bias in (block.mixer.dt_bias, block.mixer.dt_b_bias):
            dt = F.softplus(dt_bias)
            assert (dt >= 0.001 * 0.999).all() and (dt <= 0.1 * 1.001).all()
        for A_log in (block.mixer.A_log, block.mixer.A_log_b):
            assert (A_log.exp() >= 1).all() and (A_log.exp() <= 16).all()


@pytest.mark.parametrize("name", ["VisionMamba", "MambaReg"])
def test_step_sizes_and_decays_start_where_asked_and_say_how_far_a_token_reads(name):
    """In 36 patches the class token's first scan is all but its own skip by mamba-ssm's ranges, and is not by wider."""
    shares = []
    for ranges in ({}, {"dt_min": 0.1, "dt_max": 1.0, "A_init_range": (0.02, 0.3)}):
        torch.manual_seed(0)
        model = getattr(backbones, name)(48, 8, 64, 2, d_state=16, headdim=16, **ranges).eval()
        mixer = model.layers[0].mixer
        with torch.no_grad():
            if ranges:
                for dt_bias, A_log in ((mixer.dt_bias, mixer.A_log), (mixer.dt_b_bias, mixer.A_log_b)):
                    assert ((F.softplus(dt_bias) >= 0.0999) & (F.softplus(dt_bias) <= 1.001)).all()
                    assert ((A_log.exp() >= 0.0199) & (A_log.exp() <= 0.301)).all()
            M = mixer.mixing(torch.randn(4, 38, 64), torch.tensor([18]))[:, :, 0]
        skip = (mixer.D + mixer.D_b)[:, None] / 2
        M[:, :, 18] -= skip[:, 0].detach()
        shares.append((M.norm(dim=-1) / skip[:, 0]).mean().item())
    assert shares[0] < 0.02 < 0.1 < shares[1], shares


def test_linear_attention_rows_sum_to_one():
    model = build("linear_vit")
    torch.testing.assert_close(model.token_mixing(torch.randn(2, 3, 32, 32)).sum(-1), torch.ones(2, 3, 17))
    with pytest.raises(ValueError, match="key_axis='rows'; allowed: tokens, channels"):
        build("linear_vit", key_axis="rows")


@OURS
@pytest.mark.parametrize("grid", [(4, 4), (3, 5)])
def test_decomposition_is_what_the_mixer_does(name, grid):
    """Y = MX in every block and direction, causal the right way round; the mean over directions is ``mixing``."""
    model = build(name).double()
    images = torch.randn(2, 3, 8 * grid[0], 8 * grid[1], dtype=torch.float64)
    for block, parts in enumerate(model.decompose(images, range(model.depth))):
        for part in parts:
            torch.testing.assert_close(part.matrix @ part.inputs, part.outputs, atol=1e-10, rtol=0)
            future = part.matrix.triu(1) if part.direction == "forward" else part.matrix.tril(-1)
            assert part.direction == "attention" or not future.any()
        mean = torch.stack([part.matrix for part in parts]).mean(0)
        skip = model.token_mixing(images, block) - mean
        torch.testing.assert_close(skip, torch.diag_embed(skip.diagonal(dim1=-2, dim2=-1)), atol=1e-12, rtol=0)
        assert [part.direction for part in parts] in (["attention"], ["forward", "backward"])


@pytest.mark.parametrize("name", ["vit", "linear_vit"])
def test_attention_mixing_is_what_the_mixer_does(name):
    model = build(name).double()
    attention = model.blocks[0].attn
    x = torch.randn(2, 9, 24, dtype=torch.float64)
    _, _, v = attention._qkv(x)
    y = (attention.mixing(x) @ v).transpose(1, 2).flatten(2)
    torch.testing.assert_close(attention.proj(y), attention(x), atol=1e-12, rtol=0)


def test_vim_reads_the_middle_token():
    model = build("vim")
    for h, w in ((4, 4), (3, 5), (1, 1)):
        _, layout = model._embed(torch.zeros(1, 3, 8 * h, 8 * w))
        assert layout.readout.tolist() == [(h * w + 1) // 2]
        assert len(layout.patches) == h * w and 0 not in layout.patches and layout.readout[0] not in layout.patches


def test_registers_at_the_published_positions():
    assert register_positions(196, 12).tolist() == list(range(15, 192, 16))
    with pytest.raises(ValueError, match=r"num_registers=3 wants more than 3 patches; a 8 x 8 image has 1"):
        build("mambar")(torch.zeros(1, 3, 8, 8))


@pytest.mark.parametrize("new", [(61, 61), (14, 61), (7, 3), (1, 1), (32, 32), (200, 13)])
def test_positions_fit_any_grid(new):
    assert resample_pos_embed(torch.randn(1, 196, 4), (14, 14), new).shape == (1, new[0] * new[1], 4)


@ALL
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_weights_round_trip(name, suffix, tmp_path):
    model, other = build(name), FAMILIES[name]()
    weights.export(model, tmp_path / f"w{suffix}")
    weights.load(other, tmp_path / f"w{suffix}")
    for key, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[key])
    assert [p.name for p in tmp_path.iterdir()] == [f"w{suffix}"]


def test_export_is_the_references_format(tmp_path):
    model = build("vim")
    weights.export(model, tmp_path / "w.pth")
    content = torch.load(tmp_path / "w.pth", weights_only=True)
    assert list(content) == ["teacher"]
    assert set(content["teacher"]) == {f"backbone.{k}" for k in model.state_dict()}


def full_checkpoint(model, path, **changes):
    """As Dino-Mamba's training script writes it, Namespace and numpy scalars included."""
    import argparse

    import numpy as np

    backbone = {f"backbone.{k}": v for k, v in model.state_dict().items()}
    head = {"head.mlp.0.weight": torch.zeros(2, 2), "head.last_layer.weight_g": torch.ones(4, 1)}
    torch.save(
        {
            "student": {f"module.{k}": v + 1 for k, v in (backbone | head).items()},
            "teacher": backbone | head,
            "optimizer": {"state": {}, "param_groups": [{"lr": np.float64(0.1)}]},
            "epoch": 3,
            "args": argparse.Namespace(lr=np.float64(0.5), arch="vim"),
            "dino_loss": {"center": torch.zeros(1, 4)},
        }
        | changes,
        path,
    )


@OURS
def test_full_checkpoints(name, tmp_path):
    model = build(name)
    full_checkpoint(model, tmp_path / "c.pth")
    for key, shift in (("teacher", 0), ("student", 1)):
        other = FAMILIES[name]()
        assert weights.load(other, tmp_path / "c.pth", key) == "dino"
        for k, v in model.state_dict().items():
            torch.testing.assert_close(other.state_dict()[k], v + shift)
    with pytest.raises(ValueError, match="no network 'ema'; it holds student, teacher"):
        weights.load(other, tmp_path / "c.pth", "ema")


@OURS
@pytest.mark.parametrize("fault", ["missing", "unexpected", "shapes"])
def test_partial_matches_are_refused(name, fault, tmp_path):
    model, other = build(name), FAMILIES[name]()
    before = {k: v.clone() for k, v in other.state_dict().items()}
    state = model.state_dict()
    key = next(k for k in state if k.endswith("norm.weight"))
    if fault == "missing":
        del state[key]
    elif fault == "unexpected":
        key = "layers.99.extra"
        state[key] = torch.zeros(1)
    else:
        state[key] = torch.zeros(5)
    torch.save(state, tmp_path / "w.pth")
    with pytest.raises(ValueError, match=rf"{fault}: {key}"):
        weights.load(other, tmp_path / "w.pth")
    assert all(torch.equal(v, before[k]) for k, v in other.state_dict().items())


@OURS
def test_positions_of_another_size_are_resampled(name, tmp_path):
    weights.export(build(name, img_size=64), tmp_path / "w.pth")
    model = FAMILIES[name]()
    weights.load(model, tmp_path / "w.pth")
    assert model(torch.zeros(1, 3, 32, 32)).isfinite().all()


def test_files_that_are_no_weights(tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "owned"), "w"))

    model = build("vit")
    torch.save({"teacher": Evil()}, tmp_path / "evil.pth")
    with pytest.raises(ValueError, match="cannot be read"):
        weights.load(model, tmp_path / "evil.pth")
    assert not (tmp_path / "owned").exists()
    (tmp_path / "cut.pth").write_bytes(b"PK\x03\x04 no")
    with pytest.raises(ValueError, match="cannot be read"):
        weights.load(model, tmp_path / "cut.pth")
    with pytest.raises(ValueError, match=r"none\.pth' is not there"):
        weights.load(model, tmp_path / "none.pth")


def test_public_names():
    for name in ("VisionTransformer", "LinearVisionTransformer", "VisionMamba", "MambaReg", "TimmModel"):
        assert issubclass(getattr(backbones, name), backbones.Backbone)
