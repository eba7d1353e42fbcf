"""Runs through the command line at the smallest scale."""

import csv
import json
from pathlib import Path

import cli

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs"

TINY = """
data:
  init_args:
    root: {root}
    num_workers: 0
    batch_size: 8
    resize: 16
    crop: 16
trainer:
  accelerator: cpu
  max_epochs: 2
  log_every_n_steps: 1
"""
BACKBONES = {
    "vim": "VisionMamba, init_args: {img_size: 16, patch_size: 4, embed_dim: 16, depth: 2, d_state: 4, headdim: 8}",
    "mambar": "MambaReg, init_args: {img_size: 16, patch_size: 4, embed_dim: 16, depth: 2, d_state: 4, headdim: 8, num_registers: 2}",
    "vit": "VisionTransformer, init_args: {img_size: 16, patch_size: 4, embed_dim: 16, depth: 2, num_heads: 2}",
    "linear_vit": "LinearVisionTransformer, init_args: {img_size: 16, patch_size: 4, embed_dim: 16, depth: 2, num_heads: 2}",
    "timm": "TimmModel, init_args: {name: test_vit, img_size: 32}",
}
MAMBA1 = "VimMamba1, init_args: {img_size: 16, patch_size: 4, embed_dim: 16, depth: 2, d_state: 4}"
EXTRA = {
    "dino": """
data: {init_args: {multicrop: {global_size: 16, local_size: 8, num_local: 2}}}
model: {init_args: {out_dim: 16, hidden_dim: 8, bottleneck_dim: 4, warmup_epochs: 0, warmup_teacher_temp_epochs: 0, knn_k: 5}}
""",
    "linear_probe": """
data: {init_args: {probe_size: 16}}
model:
  init_args:
    num_classes: 10
    heads:
      - {n_last_blocks: 1, pooling: cls, lr: 1.0}
      - {n_last_blocks: 2, pooling: cls+mean, lr: 1.0, weight_decay: 1e-4}
      - {n_last_blocks: 1, pooling: max, lr: 0.1}
""",
    "knn": "model: {init_args: {num_classes: 10, k: [5, 1]}}",
    "binary_auc": "model: {init_args: {blocks: all}}",
    "ranks": "model: {init_args: {chunk: 6}}",
    "token_statistics": "{}",
    "robustness": "{}",
    "supervised": "data: {init_args: {probe_size: 16}}\nmodel: {init_args: {num_classes: 10, warmup_epochs: 0}}",
}
# its patches are 16 pixels
LARGE = ["--data.init_args.resize", "32", "--data.init_args.crop", "32"]
LARGE_CROPS = ["--data.init_args.multicrop.global_size", "32", "--data.init_args.multicrop.local_size", "16"]


def run(command, task, shards, out, backbone="vim", *extra):
    tiny = out / f"{task}-{backbone}.yaml"
    tiny.write_text(TINY.format(root=shards))
    (out / f"{task}-extra.yaml").write_text(EXTRA[task])
    (out / f"{backbone}.yaml").write_text(
        f"model: {{init_args: {{backbone: {{class_path: backbones.{(BACKBONES | {'vim_mamba1': MAMBA1})[backbone]}}}}}}}"
    )
    data = {"binary_auc": "demo_s", "token_statistics": "demo_s", "robustness": "demo_robustness"}.get(task, "demo")
    files = [
        CONFIGS / "base.yaml",
        CONFIGS / f"task/{task}.yaml",
        CONFIGS / f"data/{data}.yaml",
        out / f"{backbone}.yaml",
        tiny,
        out / f"{task}-extra.yaml",
    ]
    args = [a for f in files for a in ("-c", str(f))]
    cli.main(
        [
            command,
            *args,
            "--trainer.logger.init_args.save_dir",
            str(out),
            "--trainer.logger.init_args.name",
            f"{task}-{backbone}",
            *extra,
        ]
    )
    return out / f"{task}-{backbone}"


def read_results(folder):
    table = json.loads((folder / "results.json").read_text())
    with open(folder / "results.csv") as file:
        rows = list(csv.DictReader(file))
    assert [r.keys() for r in rows] == [{k: 0 for k in r}.keys() for r in table["rows"]]
    for a, b in zip(rows, table["rows"], strict=True):
        assert a == {k: "" if v is None else str(v) for k, v in b.items()}
    return table
