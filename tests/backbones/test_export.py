"""ONNX files equal eager in onnxruntime, and ``python -m backbones.weights convert MODEL OUT.onnx`` writes no other."""

import importlib.util
from pathlib import Path

import pytest
import torch

import backbones.mixers.mamba2
from backbones import export, weights
from backbones.building import sizes_of
from backbones.export import Outputs, to_onnx
from tests.backbones.test_backbones import FAMILIES, build
from tests.backbones.test_tracing import small

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
RUNS = Path(__file__).parents[1] / "golden/checkpoints"


def run(path, images):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return dict(
        zip([o.name for o in session.get_outputs()], session.run(None, {"images": images.numpy()}), strict=True)
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(name, tmp_path, capsys):
    """Batches of 1 and 5, and where the family allows it of another height and width, through the TorchScript exporter."""
    free = name != "timm"
    model = small(name, num_classes=3) if free else build(name)
    names = ("logits", "cls", "patches") if free else ("embedding",)
    names += ("registers",) if name in ("vit_reg", "mambar", "mambar_mamba1") else ()
    worst = to_onnx(Outputs(model, names), tmp_path / "m.onnx", free_size=free)
    assert set(worst) == set(names) and max(worst.values()) < 1e-5
    file = onnx.load(tmp_path / "m.onnx")
    onnx.checker.check_model(file)
    assert file.opset_import[0].version == 18
    if free:
        images = torch.randn(3, 3, 16, 48)  # neither batch nor size that to_onnx tried
        found = run(tmp_path / "m.onnx", images)
        with torch.no_grad():
            torch.testing.assert_close(torch.from_numpy(found["logits"]), model(images), atol=1e-5, rtol=1e-4)
            wanted = model.forward_features(images).patches
            torch.testing.assert_close(torch.from_numpy(found["patches"]), wanted, atol=1e-5, rtol=1e-4)
        with pytest.raises(Exception, match="Reshape"):
            run(tmp_path / "m.onnx", torch.randn(1, 3, 20, 48))  # no multiple of the patch


SLOW = [n if n == "mambar" else pytest.param(n, marks=pytest.mark.slow) for n in FAMILIES]


@pytest.mark.parametrize("name", SLOW)
def test_the_other_exporter(name, tmp_path):
    model = small(name) if name != "timm" else build(name)
    worst = to_onnx(Outputs(model), tmp_path / "m.onnx", free_size=False, exporter="dynamo")
    assert worst["embedding"] < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in FAMILIES if n != "timm"])
def test_a_free_size_by_the_other_exporter(name, tmp_path):
    worst = to_onnx(Outputs(small(name)), tmp_path / "m.onnx", exporter="dynamo")
    assert worst["embedding"] < 1e-5


# ---- the command ------------------------------------------------------------------------------------------------------


def test_convert_a_runs_checkpoint(tmp_path, capsys):
    out = tmp_path / "vim.onnx"
    weights.main(["convert", str(RUNS / "dino-vim.ckpt"), str(out), "--output", "embedding,patches", "--normalize"])
    assert "embedding within" in capsys.readouterr().out
    model = weights.build(RUNS / "dino-vim.ckpt")
    images = torch.rand(2, 3, 16, 24)
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    with torch.no_grad():
        wanted = model((images - mean.view(3, 1, 1)) / std.view(3, 1, 1))
    found = run(out, images)
    torch.testing.assert_close(torch.from_numpy(found["embedding"]), wanted, atol=1e-5, rtol=1e-4)
    assert found["patches"].shape == (2, 16, 4, 6)
    told = {p.key: p.value for p in onnx.load(out).metadata_props}
    assert told["images"] == "RGB in [0, 1]" and told["backbone"] == "VisionMamba" and told["sizes"] == "multiples of 4"
    assert [path.name for path in tmp_path.iterdir()] == ["vim.onnx"]


@pytest.mark.parametrize("name", ["vim", "mambar", "vim_mamba1", "mambar_mamba1"])
def test_weights_tell_their_sizes(name, tmp_path):
    model = build(name, num_classes=4)
    torch.save({"model": model.state_dict()}, tmp_path / "w.pth")
    found = weights.build(tmp_path / "w.pth")
    images = torch.randn(2, 3, 32, 32)
    assert type(found) is type(model) and torch.equal(found(images), model(images))
    cls, sizes = sizes_of({k: v for k, v in build(name).state_dict().items()}, "w.pth")
    assert cls is type(model) and sizes["num_classes"] == 0 and sizes["img_size"] == 32


def test_what_does_not_tell_is_refused(tmp_path):
    torch.save(build("vit").state_dict(), tmp_path / "w.pth")
    with pytest.raises(ValueError, match=r"w\.pth does not tell which backbone it is of.*--checkpoint FILE"):
        weights.build(tmp_path / "w.pth")
    with pytest.raises(ValueError, match="goes with a name"):
        weights.build(tmp_path / "w.pth", checkpoint="x.pth")
    content = {"pytorch-lightning_version": "2", "hyper_parameters": {"backbone": {"class_path": "mine.Net"}}}
    torch.save({**content, "state_dict": {"backbone.x": torch.zeros(1)}}, tmp_path / "w.ckpt")
    with pytest.raises(ValueError, match=r"mine\.Net, a class outside backbones"):
        weights.build(tmp_path / "w.ckpt")


def test_a_name_with_a_checkpoint(tmp_path, capsys):
    import timm

    model = timm.create_model("test_vit", num_classes=0).eval()
    torch.save(model.state_dict(), tmp_path / "w.pth")
    arguments = ["convert", "test_vit", str(tmp_path / "m.onnx"), "--checkpoint", str(tmp_path / "w.pth")]
    with pytest.raises(ValueError, match=r"m\.onnx is not written.*--fixed-size"):
        weights.main(arguments)
    assert not (tmp_path / "m.onnx").exists()
    weights.main([*arguments, "--fixed-size"])
    images = torch.randn(2, 3, 160, 160)
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(run(tmp_path / "m.onnx", images)["embedding"]), model(images))


def test_a_wrong_file_is_not_left(tmp_path, monkeypatch):
    """As it was before: C runs while tracing, and its result is a constant of the file."""
    model = Outputs(small("vim"))
    (tmp_path / "m.onnx").write_text("the one before")
    monkeypatch.setattr(backbones.mixers.mamba2, "is_watched", lambda *tensors: False)
    with pytest.raises(ValueError, match=r"m\.onnx is not written"):
        to_onnx(model, tmp_path / "m.onnx", free_size=False)
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]
    assert (tmp_path / "m.onnx").read_text() == "the one before"


def test_errors(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="outputs: found map; allowed: embedding, logits, cls, patches, registers"):
        Outputs(build("vim"), ["map"])
    with pytest.raises(ValueError, match="this VisionMamba has no classifier"):
        Outputs(build("vim"), ["logits"])
    with pytest.raises(ValueError, match="registers, but VisionMamba has none"):
        to_onnx(Outputs(build("vim"), ["registers"]), tmp_path / "m.onnx")
    with pytest.raises(ValueError, match="exporter='jit'; allowed: torchscript, dynamo"):
        to_onnx(Outputs(build("vim")), tmp_path / "m.onnx", exporter="jit")
    with pytest.raises(ValueError, match=r"must end in \.pth, \.safetensors or \.onnx"):
        weights.main(["convert", str(RUNS / "dino-vim.ckpt"), str(tmp_path / "m.pt")])
    with pytest.raises(ValueError, match=r"m\.pth: --normalize is for \.onnx only"):
        weights.main(["convert", str(RUNS / "dino-vim.ckpt"), str(tmp_path / "m.pth"), "--normalize"])
    find = importlib.util.find_spec
    monkeypatch.setattr(export.importlib.util, "find_spec", lambda name: None if name == "onnxscript" else find(name))
    with pytest.raises(ValueError, match=r"needs onnxscript: pip install 'dinomamba\[export\]'"):
        to_onnx(Outputs(build("vim")), tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())
