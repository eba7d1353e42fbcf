"""Every published format, on files of the right names and shapes made here."""

import argparse
import gzip
import tarfile
import types
import zipfile

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

from backbones import Backbone, MambaReg, MambaRegMamba1, TimmModel, VimMamba1, VisionMamba, VisionTransformer, weights

SMALL = dict(img_size=32, patch_size=8, embed_dim=16, depth=2)


def mambar():
    return MambaReg(**SMALL, d_state=4, headdim=8, num_registers=3)


def vim():
    return VisionMamba(**SMALL, d_state=4, headdim=8)


def vit():
    return VisionTransformer(**SMALL, num_heads=2)


def dino_head():
    return {
        "mlp.0.weight": torch.randn(8, 16), "mlp.0.bias": torch.randn(8), "mlp.2.weight": torch.randn(8, 8),
        "mlp.2.bias": torch.randn(8), "mlp.4.weight": torch.randn(4, 8), "mlp.4.bias": torch.randn(4),
        "last_layer.weight_g": torch.ones(12, 1), "last_layer.weight_v": torch.randn(12, 4),
    }  # fmt: skip


def full(state):
    """As DINO's and Dino-Mamba's training scripts write it."""
    networks = {f"backbone.{k}": v for k, v in state.items()} | {f"head.{k}": v for k, v in dino_head().items()}
    return {
        "student": {f"module.{k}": v for k, v in networks.items()},
        "teacher": networks,
        "optimizer": {"state": {}, "param_groups": [{"lr": np.float64(0.1)}]},
        "epoch": 100,
        "args": argparse.Namespace(arch="vim_small", lr=np.float64(5e-4), epochs=np.int64(100)),
        "dino_loss": {"center": torch.zeros(1, 12)},
        "fp16_scaler": None,
    }


def with_classifier(state):
    return {"model": state | {"head.weight": torch.randn(10, 16), "head.bias": torch.randn(10)}, "epoch": 300}


# (who publishes it, our model, the file's content from our state, the format told)
FORMATS = {
    "dino-mamba, full, vim": (vim, full, "dino"),
    "dino-mamba, full, mamba-reg": (mambar, full, "dino"),
    "dino-mamba, backbone": (vim, lambda s: {f"backbone.{k}": v for k, v in s.items()}, "flat"),
    "dino, backbone": (vit, dict, "flat"),
    "dino, full": (vit, full, "dino"),
    "deit": (vit, with_classifier, "supervised"),
    "vim, supervised": (lambda: VimMamba1(**SMALL, d_state=4), with_classifier, "supervised"),
    "mamba-reg, supervised": (
        lambda: MambaRegMamba1(**SMALL, d_state=4, num_registers=4, cls_reduce=2, num_classes=10),
        lambda s: {"model": s},
        "supervised",
    ),
    "lightning": (vim, lambda s: {"pytorch-lightning_version": "2.6", "state_dict": {f"teacher.backbone.{k}": v for k, v in s.items()}}, "lightning"),
    "timm, with registers": (
        lambda: TimmModel("test_vit4", img_size=64),
        lambda s: {k.removeprefix("model."): v for k, v in s.items()},
        "flat",
    ),
}  # fmt: skip
ALL = pytest.mark.parametrize("name", FORMATS)


def make(name):
    torch.manual_seed(0)
    build, content, kind = FORMATS[name]
    model = build()
    state = {k: torch.randn_like(v) if v.is_floating_point() else v for k, v in model.state_dict().items()}
    return build, state, content, kind


@ALL
def test_format_loads(name, tmp_path):
    build, state, content, kind = make(name)
    torch.save(content(state), tmp_path / "w.pth")
    model = build()
    assert weights.load(model, tmp_path / "w.pth") == kind
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[key]), key


@ALL
@pytest.mark.parametrize("fault", ["missing", "unexpected", "shapes"])
def test_one_fault_is_refused_and_named(name, fault, tmp_path):
    build, state, content, kind = make(name)
    key = sorted(k for k in state if k.endswith(("norm.weight", "norm_f.weight", "norm1.weight")))[0]
    wrong = dict(state)
    if fault == "missing":
        del wrong[key]
    elif fault == "unexpected":
        key = f"{key}.more"
        wrong[key] = torch.zeros(1)
    else:
        wrong[key] = torch.zeros(5)
    torch.save(content(wrong), tmp_path / "w.pth")
    model = build()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(ValueError, match=rf"w.pth \({kind}\) does not fit .*{fault}: {key}"):
        weights.load(model, tmp_path / "w.pth")
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


class Wrapped(Backbone):
    """A user's: its own names begin as wrappers do."""

    def __init__(self):
        super().__init__()
        self.model = torch.nn.ModuleDict({"net": torch.nn.Linear(3, 2)})

    def pooled_features(self, images): ...
    def forward_features(self, images): ...
    def forward_intermediates(self, images, n=1, stream="published"): ...


def under(prefix):
    return lambda state: {f"{prefix}{k}": v for k, v in state.items()}


def beside_a_head(prefix):
    return lambda state: under(prefix)(state) | {"criterion.center": torch.zeros(3), "head.weight": torch.zeros(2, 2)}


WRAPPINGS = {
    "compiled": under("_orig_mod."),
    "compiled under ddp": under("module._orig_mod."),
    "compiled in the middle": lambda s: {"teacher": under("backbone._orig_mod.")(s)},
    "ddp, compiled, nested": lambda s: {"model": {"state_dict": under("module._orig_mod.")(s)}, "epoch": 3},
    "data parallel": lambda s: {"state_dict": under("module.")(s)},
    "a lightning module's": lambda s: {"pytorch-lightning_version": "2.1", "state_dict": under("model.")(s)},
    "a lightning module's, deeper": lambda s: {"pytorch-lightning_version": "2.1", "state_dict": beside_a_head("model.encoder.")(s)},
    "ours, compiled": lambda s: {"pytorch-lightning_version": "2.6", "state_dict": under("teacher.backbone._orig_mod.")(s)},
    "model_state_dict": lambda s: {"model_state_dict": s, "optimizer_state_dict": {"state": {}}},
    "beside its average": lambda s: {"model": s, "model_ema": {k: v + 1 for k, v in s.items()}},
    "one of any name": lambda s: {"generator": s, "step": 1},
    "net": under("net."),
    "encoder and head": beside_a_head("encoder."),
    "fsdp": under("_fsdp_wrapped_module."),
    "fsdp and checkpointing": lambda s: {"model": under("module._fsdp_wrapped_module._checkpoint_wrapped_module.")(s)},
    "moco": lambda s: {"state_dict": under("module.encoder_q.")(s) | under("module.encoder_k.")({k: v + 1 for k, v in s.items()})},
    "moco v3": lambda s: {"state_dict": beside_a_head("module.base_encoder.")(s)},
    "clip": lambda s: under("visual.trunk.")(s) | {"logit_scale": torch.zeros(1)},
    "lightly": lambda s: {"pytorch-lightning_version": "2.1", "state_dict": under("student_backbone.")({k: v + 1 for k, v in s.items()}) | under("teacher_backbone.")(s)},
    "a teacher alone": lambda s: {"pytorch-lightning_version": "2.1", "state_dict": under("teacher.")(s)},
    "a teacher and a student by name": lambda s: under("student.")({k: v + 1 for k, v in s.items()}) | under("teacher.")(s),
    "averaged by torch": lambda s: under("module.")(s) | {"n_averaged": torch.tensor(3)},
    "masked pretraining": lambda s: {"model": s | {"mask_token": torch.zeros(1), "decoder_embed.weight": torch.zeros(2, 2)}},
}  # fmt: skip
MODELS = {"vim": vim, "timm": lambda: TimmModel("test_vit4", img_size=64), "a user's": Wrapped}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", WRAPPINGS)
def test_what_held_the_model_is_taken_off(name, model, tmp_path):
    torch.manual_seed(0)
    saved, loaded = MODELS[model](), MODELS[model]()
    torch.save(WRAPPINGS[name](saved.state_dict()), tmp_path / "w.pth")
    weights.load(loaded, tmp_path / "w.pth")
    own = loaded.state_dict()
    assert all(torch.equal(value, own[key]) for key, value in saved.state_dict().items())


def test_which_of_several_networks(tmp_path, capsys):
    model, loaded = vim(), vim()
    state = model.state_dict()
    average = {k: v + 1 for k, v in state.items()}
    torch.save({"model": state, "model_ema": average}, tmp_path / "both.pth")
    weights.load(loaded, tmp_path / "both.pth", "model_ema")
    assert all(torch.equal(value, average[key]) for key, value in loaded.state_dict().items())
    torch.save({"g": state, "d": average}, tmp_path / "two.pth")
    with pytest.raises(ValueError, match="holds several networks: g, d; say which by weights_key"):
        weights.load(loaded, tmp_path / "two.pth")
    torch.save(WRAPPINGS["ddp, compiled, nested"](state), tmp_path / "nested.pth")
    weights.main(["convert", str(tmp_path / "nested.pth"), str(tmp_path / "out.safetensors")])
    assert load_file(tmp_path / "out.safetensors").keys() == state.keys()


def test_published_names_and_shapes():
    """FACTS of the published files: Mamba-Reg's 49 positions, (1, 12, D) registers, Vim's Mamba-1 parameters."""
    with torch.device("meta"):
        reg = timm.create_model("mambar_base_patch16_224", img_size=112).state_dict()
        sup = timm.create_model("vim_tiny_mamba1_patch16_224").state_dict()
        large = MambaRegMamba1(embed_dim=1024, depth=48, num_registers=16, cls_reduce=8, num_classes=1000)
    assert reg["pos_embed"].shape == (1, 49, 768)
    assert reg["cls_token"].shape == reg["pos_embed_cls"].shape == (1, 12, 768)
    assert sup["pos_embed"].shape == (1, 197, 192) and sup["layers.23.mixer.A_b_log"].shape == (384, 16)
    assert sup["layers.0.mixer.x_proj_b.weight"].shape == (12 + 2 * 16, 384)
    assert sup["layers.0.mixer.dt_proj_b.bias"].shape == (384,)
    assert large.state_dict()["neck.weight"].shape == (128, 1024) and large.head.weight.shape == (1000, 2048)


def test_middle_position_stays_with_the_class_token(tmp_path):
    """Vim's positions stand in sequence order: resampling moves patches', not the class token's."""
    large, small = (VimMamba1(**(SMALL | {"img_size": side}), d_state=4) for side in (64, 32))
    torch.nn.init.normal_(large.pos_embed)
    weights.export(large, tmp_path / "w.safetensors")
    weights.load(small, tmp_path / "w.safetensors")
    torch.testing.assert_close(small.pos_embed[:, 8], large.pos_embed[:, 32])
    x, layout = large._embed(torch.zeros(1, 3, 32, 32))
    assert layout.readout.tolist() == [8]
    torch.testing.assert_close(x[:, 8], (large.cls_token + large.pos_embed[:, 32:33])[:, 0])


def test_linear_classifier(tmp_path):
    state = {"module.linear.weight": torch.randn(10, 32), "module.linear.bias": torch.randn(10)}
    content = {"epoch": 100, "state_dict": state, "optimizer": {}, "scheduler": {}, "best_acc": np.float64(77.0)}
    torch.save(content, tmp_path / "checkpoint.pth.tar")
    weight, bias = weights.linear(tmp_path / "checkpoint.pth.tar")
    assert torch.equal(weight, state["module.linear.weight"]) and torch.equal(bias, state["module.linear.bias"])
    with pytest.raises(ValueError, match="linear classifier without a backbone"):
        weights.load(vit(), tmp_path / "checkpoint.pth.tar")
    del state["module.linear.bias"]
    torch.save(content, tmp_path / "half.pth")
    with pytest.raises(ValueError, match=r"no linear classifier.*weight \(10, 32\)"):
        weights.linear(tmp_path / "half.pth")


def hub_file(home, state):
    """A file as huggingface_hub keeps it in its cache."""
    folder = home / "hub" / "models--someone--vim"
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    save_file(state, folder / "snapshots" / "abc" / "w.safetensors")


def test_hub_addresses(tmp_path, monkeypatch):
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    state = {k: torch.randn_like(v) for k, v in vim().state_dict().items()}
    hub_file(tmp_path, state)
    model = vim()
    assert weights.load(model, "hf://someone/vim/w.safetensors") == "flat"
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    with pytest.raises(ValueError, match=r"hf://someone/vim/other.pth is neither in .*cache nor.*give its path"):
        weights.load(model, "hf://someone/vim/other.pth")
    with pytest.raises(ValueError, match="write hf://owner/repo/file"):
        weights.load(model, "hf://w.pth")


def test_timm_names(monkeypatch):
    model = TimmModel("test_vit")
    published = timm.create_model("test_vit")

    def create(name, pretrained=False, **kwargs):
        assert pretrained and name == "test_vit.r160_in1k"
        return published

    monkeypatch.setattr("backbones.checkpoints.timm.create_model", create)
    assert weights.load(model, "test_vit.r160_in1k") == "timm"
    assert all(torch.equal(v, published.state_dict()[k]) for k, v in model.model.state_dict().items())


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "vit_small_patch14_reg4_dinov2"])
def test_timm_positions_of_another_size_are_timms(name, tmp_path):
    """DINOv2's files hold a 37 x 37 grid, with positions for the class token or (with registers) without."""
    patch = int(name.split("patch")[1][:2])
    large, small = TimmModel(name, img_size=7 * patch), TimmModel(name, img_size=5 * patch)
    torch.nn.init.normal_(large.model.pos_embed)
    weights.export(large, tmp_path / "w.safetensors")
    weights.load(small, tmp_path / "w.safetensors")
    own = small.model
    expected = timm.layers.resample_abs_pos_embed(
        large.model.pos_embed, [5, 5], num_prefix_tokens=own.pos_embed.shape[1] - 25
    )
    torch.testing.assert_close(own.pos_embed, expected)


def test_timm_name_without_a_network(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="without a network, give a file's path"):
        weights.load(vit(), "vit_small_patch16_224.dino")


def test_inspect_and_convert(tmp_path, capsys):
    state = vim().state_dict()
    torch.save(full(state), tmp_path / "full.pth")
    weights.main(["inspect", str(tmp_path / "full.pth")])
    told = capsys.readouterr().out
    assert "full.pth: dino" in told and "layers.*.mixer.A_log  (4,)  float32  x 2" in told
    for out in ("w.safetensors", "w.pth"):
        weights.main(["convert", str(tmp_path / "full.pth"), str(tmp_path / out), "--key", "student"])
        model = vim()
        weights.load(model, tmp_path / out)
        assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    with pytest.raises(ValueError, match=r"must end in \.pth, \.safetensors or \.onnx"):
        weights.main(["convert", str(tmp_path / "full.pth"), str(tmp_path / "w.bin")])


def test_what_several_names_share_is_exported_under_each(tmp_path):
    model = vit()
    model.blocks[1].mlp = model.blocks[0].mlp
    for name in ("export.pth", "export.safetensors"):
        weights.export(model, tmp_path / name)
        again = vit()
        weights.load(again, tmp_path / name)
        assert again.state_dict().keys() == model.state_dict().keys()
        assert all(torch.equal(v, model.state_dict()[k]) for k, v in again.state_dict().items())


def test_an_average_that_is_not_taken_is_said(tmp_path, caplog):
    state = vim().state_dict()
    torch.save({"state_dict": state, "state_dict_ema": state}, tmp_path / "timm.pth")
    weights.load(vim(), tmp_path / "timm.pth")
    assert "timm.pth holds state_dict_ema too: weights_key=state_dict_ema takes it" in caplog.text
    caplog.clear()
    weights.load(vim(), tmp_path / "timm.pth", "state_dict_ema")
    assert not caplog.text
    torch.save({"student": under("module.backbone.")(state)}, tmp_path / "student.pth")
    with pytest.raises(ValueError, match=r"no network 'teacher'; it holds student: say which by weights_key"):
        weights.load(vim(), tmp_path / "student.pth")


def packed(path, state):
    torch.save(state, path)
    return path.read_bytes()


FILES = {
    "gzip": (lambda data: gzip.compress(data), "compressed by gzip: unpack it first"),
    "a web page": (lambda data: b"\n<!DOCTYPE html><html>Sign in</html>", "a web page"),
    "git lfs": (lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "a pointer of Git LFS"),
    "empty": (lambda data: b"", "empty: download or copy it again"),
    "cut": (lambda data: data[: len(data) // 2], "cut short: download or copy it again"),
    "a picture": (lambda data: b"\x89PNG\r\n", "a picture"),
    "text": (lambda data: b"hello, this is no checkpoint", "it is no file of PyTorch's"),
    "hdf5": (lambda data: b"\x89HDF\r\n\x1a\n", "HDF5"),
}


@pytest.mark.parametrize("name", FILES)
def test_what_is_no_file_of_weights_is_told(name, tmp_path):
    made, said = FILES[name]
    path = tmp_path / "w.pth"
    path.write_bytes(made(packed(path, vim().state_dict())))
    with pytest.raises(ValueError) as error:
        weights.load(vim(), path)
    text = str(error.value)
    assert text.startswith(f"{path} cannot be read as weights: ") and said in text
    assert "weights_only" not in text and "arbitrary" not in text  # torch's advice is to run what the file says


def test_what_would_run_code_is_refused(tmp_path):
    torch.save({"model": vim().state_dict(), "args": types.SimpleNamespace(lr=1)}, tmp_path / "w.pth")
    with pytest.raises(ValueError, match=r"beside tensors it holds types.SimpleNamespace, which would run code"):
        weights.load(vim(), tmp_path / "w.pth")
    (tmp_path / "w.zip").write_bytes(b"")
    with zipfile.ZipFile(tmp_path / "w.zip", "w") as archive:
        archive.writestr("readme", "x")
    with pytest.raises(ValueError, match="a zip archive of something else"):
        weights.load(vim(), tmp_path / "w.zip")
    with tarfile.open(tmp_path / "w.tar", "w") as archive:
        archive.add(tmp_path / "w.zip", "w")
    with pytest.raises(ValueError, match="a tar archive"):
        weights.load(vim(), tmp_path / "w.tar")


def test_safetensors_by_content(tmp_path):
    model = vim()
    weights.export(model, tmp_path / "w.safetensors")
    (tmp_path / "w.safetensors").rename(tmp_path / "w.bin")
    weights.load(vim(), tmp_path / "w.bin")
    weights.export(model, tmp_path / "w.pth")
    (tmp_path / "w.pth").rename(tmp_path / "p.safetensors")
    weights.load(vim(), tmp_path / "p.safetensors")


@pytest.mark.parametrize(
    ("source", "said"),
    [("https://x.y/z.pth", "is a web address: download"), ("", "'' is empty"), (".", "is a folder"), ("no.pth", "is not there")],
)  # fmt: skip
def test_sources_that_are_no_file(source, said):
    with pytest.raises(ValueError, match=said):
        weights.load(vim(), source)
