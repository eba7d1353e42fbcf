"""The contract that heads, probes and figures rely on, swept over our families and timm's of every shape."""

import pytest
import timm
import torch
from timm.optim import create_optimizer_v2
from torch import nn

import backbones
from backbones import Backbone, Features, HierarchicalBackbone, MixingBackbone, TimmModel, weights
from tests.backbones.test_backbones import FAMILIES, build

TIMM = {  # name -> (options, whether its blocks mix all tokens by one attention each)
    "swin_tiny_patch4_window7_224": ({"img_size": 64}, False),
    "convnext_atto": ({}, False),
    "resnet18": ({}, False),
    "vit_tiny_patch16_224": ({"img_size": 64}, True),
    "vit_small_patch14_reg4_dinov2": ({"img_size": 56}, True),
    "vit_base_patch16_gap_224": ({"img_size": 64}, True),
    "deit_tiny_distilled_patch16_224": ({"img_size": 64}, True),
    "mixer_s32_224": ({"img_size": 224}, False),
    "pvt_v2_b0": ({}, False),
    "mobilenetv4_conv_small": ({}, False),
    "mambaout_femto": ({}, False),
    "hgnetv2_b0": ({}, False),
    "xcit_nano_12_p16_224": ({}, False),  # mixes channels; its class token comes behind the blocks
    "cait_xxs24_224": ({"img_size": 64}, False),  # the same of the class token, heads mixed before and after softmax
    "vit_dlittle_patch16_reg1_gap_256": ({"img_size": 64}, False),  # differences of two maps
    "vit_pwee_patch16_reg1_gap_256": ({"img_size": 64}, False),  # attention and MLP in one module
    "beit_base_patch16_224": ({"img_size": 64}, True),
    "vit_small_patch16_dinov3": ({"img_size": 64}, True),
    "deit3_small_patch16_224": ({"img_size": 64}, True),
    "efficientvit_b0": ({}, False),
}
LARGE = {"samvit_base_patch16": ({"img_size": 512}, False), "vgg11": ({}, False)}  # windows; 4,096 features of 512


FIXED = {"MlpMixer": 224, "VisionTransformerDistilled": 64, "SwinTransformer": 64, "Cait": 64, "Beit": 64}
"""Families whose models take one size."""


class Pyramid(HierarchicalBackbone):
    """The smallest that the contract allows: what a user writes."""

    num_features, patch_size = 12, 8

    def __init__(self, num_classes=0):
        super().__init__()
        self.stages = nn.ModuleList([nn.Conv2d(3, 6, 4, 4), nn.Conv2d(6, 12, 2, 2)])
        self.norm = nn.GroupNorm(1, 12)
        self.feature_info = [
            {"num_chs": 6, "reduction": 4, "module": "stages.0"}, {"num_chs": 12, "reduction": 8, "module": "stages.1"},
        ]  # fmt: skip
        self.reset_classifier(num_classes)

    def _stages(self, images):
        x = images
        for stage in self.stages:
            x = self._run(stage, x)
            yield x

    def _normalize(self, stage, features):
        return self.norm(features) if stage == 1 else features


MODELS = {
    **{name: lambda name=name, options=options: TimmModel(name, **options) for name, (options, _) in TIMM.items()},
    **{name: lambda name=name: build(name) for name in FAMILIES if name != "timm"},
    "pyramid": Pyramid,
}


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    torch.manual_seed(0)
    return MODELS[request.param]().eval()


def images_for(model, batch=2):
    """A picture that is not square, where the model takes any."""
    torch.manual_seed(1)
    kind = type(model.model).__name__ if isinstance(model, TimmModel) else ""
    if kind in FIXED:
        height = width = FIXED[kind]
    else:
        height, width = (4 * model.patch_size, 3 * model.patch_size)
    return torch.randn(batch, 3, height, width)


@torch.no_grad()
def test_features_follow_feature_info(model):
    images = images_for(model)
    assert (
        isinstance(model, Backbone) and model.embed_dim == model.num_features and model.depth == len(model.feature_info)
    )
    assert model(images).shape == (2, model.num_features)
    torch.testing.assert_close(model(images), model.embedding(images))
    every = model.forward_intermediates(images, model.depth)
    assert len(every) == model.depth
    for info, features in zip(model.feature_info, every, strict=True):
        cells = tuple(-(-side // info["reduction"]) for side in images.shape[-2:])
        assert isinstance(features, Features)
        assert features.patches.shape == (2, info["num_chs"], *cells) and features.cls.shape == (2, info["num_chs"])
        assert model.get_submodule(info["module"] if not isinstance(model, TimmModel) else f"model.{info['module']}")
    last = model.forward_features(images)
    assert last.patches.shape == every[-1].patches.shape
    # heads read what k-NN compares, unless blocks have a class token beside a pooled embedding
    (read,) = model.forward_readouts(images, 1, "residual")
    assert read.cls.shape == (2, model.cls_widths[-1]) and torch.equal(read.patches.isfinite(), last.patches.isfinite())
    torch.testing.assert_close(read.cls, model(images) if model.embedding_is_cls else last.cls)


@torch.no_grad()
def test_blocks_by_number_and_by_count(model):
    images = images_for(model)
    every = model.forward_intermediates(images, model.depth)
    some = model.forward_intermediates(images, [-1, 0])
    assert len(some) == min(2, model.depth)
    for one, wanted in zip(some, (every[0], every[-1]), strict=False):
        torch.testing.assert_close(one.patches, wanted.patches)
        torch.testing.assert_close(one.cls, wanted.cls)
    for wrong in (0, model.depth + 1, [model.depth], [-model.depth - 1]):
        with pytest.raises(ValueError, match=str(wrong[0] if isinstance(wrong, list) else wrong)):
            model.forward_intermediates(images, wrong)
    with pytest.raises(ValueError, match="stream='both'; allowed: published, branch, residual"):
        model.forward_intermediates(images, 1, "both")


@torch.no_grad()
def test_streams(model):
    """The branch is what the residual stream gained, where a block has nothing else."""
    images = images_for(model)
    published, residual = (model.forward_intermediates(images, model.depth, s) for s in ("published", "residual"))
    has_branch = not isinstance(model, HierarchicalBackbone) and (
        not isinstance(model, TimmModel) or model.mixes_tokens()
    )
    if not has_branch:
        with pytest.raises(ValueError, match="branch"):
            model.forward_intermediates(images, 1, "branch")
        branch = []
    else:
        branch = model.forward_intermediates(images, model.depth, "branch")
        assert all(b.patches.shape == r.patches.shape for b, r in zip(branch, residual, strict=True))
        assert not torch.allclose(branch[-1].patches, residual[-1].patches)
    for p, r in zip(published, {"residual": residual, "branch": branch}[model.published_stream], strict=True):
        assert torch.equal(p.patches, r.patches) and torch.equal(p.cls, r.cls)
    if not isinstance(model, TimmModel):
        torch.testing.assert_close(model.forward_features(images).cls, residual[-1].cls)


@torch.no_grad()
def test_mixing_is_of_the_block_that_was_asked_for(model):
    images = images_for(model)
    if not isinstance(model, MixingBackbone):
        return
    if not model.mixes_tokens():
        for ask in (model.token_mixing, model.cls_mixing):
            with pytest.raises(ValueError, match="no token-mixing matrix"):
                ask(images)
        with pytest.raises(ValueError, match="no token-mixing matrix"):
            model.inspect(images)
        return
    every = [model.token_mixing(images, block) for block in range(model.depth)]
    assert torch.equal(model.token_mixing(images), every[-1])
    assert not torch.equal(every[0], every[-1])
    length = every[0].shape[-1]
    assert all(M.shape[0] == 2 and M.shape[-2:] == (length, length) for M in every)


@pytest.mark.parametrize("name", [*TIMM, *(pytest.param(name, marks=pytest.mark.slow) for name in LARGE)])
def test_who_mixes(name):
    """Told by what the attention does on an image, not by its name."""
    options, mixes = (TIMM | LARGE)[name]
    model = TimmModel(name, **options).eval()
    assert model.mixes_tokens() == mixes
    if name in LARGE:
        images = torch.randn(1, 3, *(2 * [options.get("img_size", 64)]))
        with torch.no_grad():
            assert model(images).shape == (1, model.num_features)
            last = model.forward_intermediates(images)[0]
        assert last.patches.shape[1] == model.feature_info[-1]["num_chs"]


@torch.no_grad()
def test_timms_last_attention_is_the_last_blocks():
    """Each block's matrix, found by running that block alone."""
    model = TimmModel("vit_tiny_patch16_224", img_size=64).eval()
    images = images_for(model)
    seen = {}
    for number, block in enumerate(model.model.blocks):
        block.attn.register_forward_pre_hook(lambda _, inputs, number=number: seen.__setitem__(number, inputs[0]))
    model.model(images)
    for number in (0, 5, 11):
        attention = model.model.blocks[number].attn
        q, k, _ = attention.qkv(seen[number]).unflatten(-1, (3, attention.num_heads, -1)).permute(2, 0, 3, 1, 4)
        wanted = (q @ k.transpose(-1, -2) * attention.scale).softmax(-1)
        torch.testing.assert_close(model.token_mixing(images, number), wanted)


@pytest.mark.parametrize(
    "name",
    ["vit_small_patch14_reg4_dinov2", "beit_base_patch16_224", "vit_small_patch16_dinov3", "deit3_small_patch16_224"],
)
@torch.no_grad()
def test_the_branch_of_timms_blocks_is_what_they_add(name):
    """Behind whatever scales it: LayerScale, BEiT's and Eva's gamma."""
    model = TimmModel(name, **TIMM[name][0]).eval()
    images, block = images_for(model), model.model.blocks[3]
    for key, parameter in block.named_parameters():
        if key in ("ls1.gamma", "gamma_1"):
            nn.init.uniform_(parameter, 0.05, 1.0)
    seen = {}
    block.register_forward_pre_hook(lambda _, inputs: seen.update(before=inputs[0]))
    block.norm2.register_forward_pre_hook(lambda _, inputs: seen.update(after=inputs[0]))
    found = model.forward_intermediates(images, [3], "branch")[0]
    tokens = model.model.norm(seen["after"] - seen["before"])
    prefix = model.num_prefix
    torch.testing.assert_close(found.cls, tokens[:, 0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.patches.flatten(2).transpose(1, 2), tokens[:, prefix:], atol=1e-4, rtol=1e-4)
    assert (found.registers is None) == (prefix == 1)


# ---- timm's conventions ---------------------------------------------------------------------------------------

OURS = [
    "vim_tiny_patch16_224",
    "mambar_tiny_patch16_224",
    "linear_vit_small_patch16_224",
    "vim_tiny_mamba1_patch16_224",
    "mambar_small_mamba1_patch16_224",
]
SMALL = {"depth": 4, "img_size": 64}


@pytest.mark.parametrize("name", OURS)
@torch.no_grad()
def test_features_only(name):
    images = torch.randn(1, 3, 64, 96)
    extractor = timm.create_model(name, features_only=True, out_indices=[0, -1], **SMALL).eval()
    maps = extractor(images)
    width = extractor.backbone.num_features
    assert [m.shape for m in maps] == [(1, width, 4, 6)] * 2
    assert extractor.feature_info.channels() == [width, width] and extractor.feature_info.reduction() == [16, 16]
    assert [n.rpartition(".")[2] for n in extractor.feature_info.module_name()] == ["0", "3"]
    torch.testing.assert_close(maps[1], extractor.backbone.forward_intermediates(images)[0].patches)
    assert len(timm.create_model(name, features_only=True, **SMALL)(images)) == 3
    assert len(timm.create_model(name, features_only=True, out_indices=2, **SMALL)(images)) == 2
    with pytest.raises(ValueError, match="block=4"):
        timm.create_model(name, features_only=True, out_indices=[4], **SMALL)
    with pytest.raises(ValueError, match="features_only"):
        timm.create_model(name, out_indices=[1], **SMALL)


@pytest.mark.parametrize("name", OURS)
def test_classifier(name):
    torch.manual_seed(0)
    images = torch.randn(2, 1, 64, 96)
    model = timm.create_model(name, num_classes=7, in_chans=1, **SMALL)
    assert (
        model.num_classes == 7
        and model(images).shape == (2, 7)
        and model.embedding(images).shape == (2, model.num_features)
    )
    assert model.get_classifier().out_features == 7
    model(images).sum().backward()
    assert model.get_classifier().weight.grad.abs().sum() > 0
    model.reset_classifier(3)
    assert model(images).shape == (2, 3)
    model.reset_classifier(0, "avg")
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(images), model.forward_features(images).patches.mean((2, 3)))
        assert not model.embedding_is_cls
        model.reset_classifier(0, "")
        assert model(images).ndim == 3 and model(images).shape[::2] == (2, model.num_features)
    with pytest.raises(ValueError, match="no classifier"):
        model.logits(images)
    with pytest.raises(ValueError, match=r"global_pool='max'.*'token', 'avg', ''"):
        model.reset_classifier(0, "max")
    with pytest.raises(ValueError, match="num_classes=4"):
        model.reset_classifier(4, "")


def test_registry_names_and_errors():
    for name in ("vim_small", "mambar_tiny", "mambar_small", "linear_vit_small"):
        assert timm.is_model(f"{name}_patch16_224")
    tiny = {"depth": 1, "img_size": 32}
    model = timm.create_model("vim_tiny_patch16_224", drop_path_rate=0.1, global_pool="avg", **tiny)
    assert model.depth == 1 and model(torch.zeros(1, 3, 32, 32)).shape == (1, 256) and model.global_pool == "avg"
    config = timm.data.resolve_model_data_config(timm.create_model("vim_tiny_patch16_224", in_chans=1, **tiny))
    assert config["input_size"] == (1, 32, 32) and config["interpolation"] == "bicubic" and config["crop_pct"] == 0.875
    with pytest.raises(ValueError, match="weights"):
        timm.create_model("vim_tiny_patch16_224", depth=1, pretrained=True)
    with pytest.raises(ValueError, match="dynamic_img_size=False"):
        timm.create_model("vim_tiny_patch16_224", dynamic_img_size=False, **tiny)
    with pytest.raises(TypeError):
        timm.create_model("vim_tiny_patch16_224", depht=1)


@pytest.mark.parametrize("name", [n for n in FAMILIES if n != "timm"] + ["pyramid"])
def test_layer_wise_decay(name):
    """The embedding's rate is the lowest, the classifier's the full one; vectors, tokens and positions do not decay."""
    model = MODELS[name]()
    model.reset_classifier(5)
    groups = model.param_groups(0.1, layer_decay=0.5)
    scale = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    named = dict(model.named_parameters())
    assert len(scale) == len(named)
    blocks = [info["module"] for info in model.feature_info]
    for key, parameter in named.items():
        inside = [i for i, block in enumerate(blocks) if key.startswith(f"{block}.")]
        if inside or (key.startswith("norm") and not key.startswith("norm_neck")):
            power = len(blocks) - (inside[0] if inside else len(blocks) - 1)
        else:
            power = 0 if key.startswith(("head", "neck", "norm_neck")) else len(blocks) + 1
        assert scale[id(parameter)] == pytest.approx(0.5**power), key
        spared = parameter.ndim <= 1 or key.endswith(".bias") or "." not in key
        assert decay[id(parameter)] == (0.0 if spared else 0.1), key
    plain = {id(p): group["weight_decay"] for group in model.param_groups(0.1) for p in group["params"]}
    assert plain == decay
    assert create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.1, layer_decay=0.5)


def test_timms_layers_decay_through_timms_own_functions():
    """Its patterns are of names within the wrapper."""
    model = TimmModel("vit_tiny_patch16_224", img_size=64)
    groups = create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.1, layer_decay=0.5).param_groups
    scale = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    assert scale[id(model.model.patch_embed.proj.weight)] == pytest.approx(0.5**12)  # there is no classifier
    assert scale[id(model.model.blocks[11].mlp.fc1.weight)] == 1.0
    spared = {id(p) for group in model.param_groups(0.1) if not group["weight_decay"] for p in group["params"]}
    assert id(model.model.pos_embed) in spared and id(model.model.blocks[0].mlp.fc1.weight) not in spared


def test_a_classifier_of_timm_is_left_out(tmp_path):
    """Whatever the family calls it."""
    for name in ("resnet18", "mobilenetv4_conv_small", "test_vit"):
        torch.save(timm.create_model(name).state_dict(), tmp_path / "w.pth")
        weights.load(TimmModel(name), tmp_path / "w.pth")


def test_stages_of_any_name_decay_by_their_order():
    model = Pyramid()
    model.layer1, model.layer2 = model.stages
    del model.stages
    for i, info in enumerate(model.feature_info):
        info["module"] = f"layer{i + 1}"
    scale = {id(p): g["lr_scale"] for g in model.param_groups(0.1, layer_decay=0.5) for p in g["params"]}
    assert scale[id(model.layer1.weight)] == 0.5 and scale[id(model.layer2.weight)] == 1.0


def test_a_refused_classifier_changes_nothing():
    model = Pyramid(num_classes=3)
    with pytest.raises(ValueError, match="num_classes=5 with global_pool=''"):
        model.reset_classifier(5, "")
    assert model.global_pool == "avg" and model(torch.zeros(1, 3, 16, 16)).shape == (1, 3)


def test_what_mixes_tokens_says_so():
    assert issubclass(backbones.SequenceBackbone, MixingBackbone) and not issubclass(
        HierarchicalBackbone, MixingBackbone
    )
    assert not hasattr(Pyramid(), "token_mixing")
    with pytest.raises(ValueError, match="timm has no model 'vitt_huge'"):
        TimmModel("vitt_huge")
