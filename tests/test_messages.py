"""The last line of a configuration that is refused: the key, what was found, and what is allowed."""

import pytest
import yaml

import cli

FILES = ["base.yaml", "task/dino.yaml", "data/imagenet.yaml", "backbone/vim_tiny.yaml"]
REFUSED = {
    "a number for a list": ({"data": {"init_args": {"std": 0.5}}}, "data.std=0.5; allowed: a list of float, null"),
    "a list for a pattern": (
        {"data": {"init_args": {"val_shards": ["a.tar"]}}}, "data.val_shards=['a.tar']; allowed: str, null",
    ),
    "a side of one": (
        {"model": {"init_args": {"backbone": {"init_args": {"img_size": [16]}}}}},
        "model.backbone.img_size=[16]; allowed: int, a list of 2 int",
    ),
    "two of three": ({"data": {"init_args": {"rgb": [1, 2]}}}, "data.rgb=[1, 2]; allowed: a list of 3 int, null"),
    "a backbone for a model": (
        {"model": {"class_path": "backbones.VisionMamba"}},
        "model.class_path=backbones.VisionMamba is no LightningModule; wanted a method or evaluation",
    ),
    "a model for data": (
        {"data": {"class_path": "lightning_modules.KNN"}},
        "data.class_path=lightning_modules.KNN is no LightningDataModule; wanted one such as datamodules.",
    ),
    "mmcv's mean": (
        {"data": {"init_args": {"mean": [123.675, 116.28, 103.53], "std": [58.395, 57.12, 57.375]}}},
        "data.init_args.mean=[123.675, 116.28, 103.53]: of images of 8 bits it is a share of the full scale, in [0, 1]; "
        "divide by 255",
    ),
    "nothing for data": ({"data": ""}, "data is empty; wanted class_path and init_args, or a file that holds them"),
    "nothing for one of a few": ({"trainer": {"precision": ""}}, "trainer.precision=''; allowed: "),
    "nothing for a word": ({"data": {"init_args": {"view": ""}}}, "data.view=''; allowed: multicrop, probe, features"),
    "no duration": ({"trainer": {"max_time": "abc"}}, "trainer.max_time='abc'; allowed: DD:HH:MM:SS, days first"),
    "a part of no duration": (
        {"trainer": {"val_check_interval": {"a": 1}}}, "trainer.val_check_interval={'a': 1}; allowed: numbers called days",
    ),
    "no time at all": ({"trainer": {"max_time": {"hours": 0}}}, "trainer.max_time={'hours': 0}: no time at all"),
    "a mean alone": (
        {"data": {"init_args": {"mean": [0.5, 0.5, 0.5]}}},
        "data.init_args.mean is set and data.init_args.std is not: set both, or leave both out",
    ),
    "a device that is not there": ({"trainer": {"accelerator": "gpu"}}, "trainer.accelerator asks for a device that"),
}  # fmt: skip


def test_an_option_of_a_class_that_nothing_names_says_what_to_put_first(tmp_path, capfd):
    with pytest.raises(SystemExit):
        args = [part for name in FILES[1:] for part in ("-c", name)]
        cli.main(["fit", *args, "--data.root", str(tmp_path), "--trainer.logger.init_args.name", "mine"])
    line = capfd.readouterr().err.strip().splitlines()[-1]
    assert line.startswith(
        "error: trainer.logger.init_args.name: nothing says yet which class trainer.logger is; files"
    )


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_said_in_one_line(name, tmp_path, capfd, monkeypatch):
    config, said = REFUSED[name]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: False)
    (tmp_path / "more.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(SystemExit) as stop:
        args = [a for name in (*FILES, str(tmp_path / "more.yaml")) for a in ("-c", name)]
        cli.main(["fit", *args, "--data.root", str(tmp_path)])
    line = capfd.readouterr().err.strip().splitlines()[-1]
    assert stop.value.code and line.startswith(f"error: {said}")
