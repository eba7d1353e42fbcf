"""All of paper.yaml is checked when it is read: the key, what was found, what is allowed, in one line."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import configs
from analysis import figure_pages, renderers, statements, study_values, sweeps
from analysis.result_rows import HEAD_FIELDS
from experiments import paper, spec
from experiments.checks import either, flag, keys, list_of, null_or, number, text

WHOLE = spec.PATH.read_text()
TABLE1 = "model: vit_small, n_last_blocks: 4, pooling: cls, value: 77.0, source: paper, inferred: true,"


def write(folder, *changes):
    """paper.yaml with something in place of something that it says; other mentions of it stay as they are."""
    written = WHOLE
    for old, new in changes:
        assert old in written, old
        written = written.replace(old, new, 1)
    path = folder / "experiments" / "paper.yaml"
    path.parent.mkdir()
    path.write_text(written)
    return path


STRIDE = 47
"""Every so many places of the file, which takes seconds; all of them take minutes."""

WRONG = {  # what stands there -> what is written in its place, and what is said of it
    "seeds": ("seeds: [0, 1, 2, 3, 4]", "seeds: five", 'targets.study.seeds: "five"; allowed: a list'),
    "a seed": ("seeds: [0, 1, 2, 3, 4]", "seeds: [0, -1]", "targets.study.seeds.1: -1; allowed: a whole number from 0 to"),
    "a seed twice": ("seeds: [0, 1, 2", "seeds: [0, 0, 2", "targets.study.seeds.1: 0; allowed: each once"),
    "a value": ("value: 77.0", "value: abc", 'table1.published.0.value: "abc"; allowed: a number from 0 to 100'),
    "a quoted value": ("value: 77.0", 'value: "77.0"', 'published.0.value: "77.0"; allowed: a number from 0 to 100'),
    "a share": ("value: 77.0", "value: 770", "published.0.value: 770; allowed: a number from 0 to 100"),
    "no value": ("value: 77.0, ", "", "targets.table1.published.0: the key value is missing"),
    "a value by": ("{mIoU: 29.2", '{mIoU: "29.2"', 'table2.published.0.values.mIoU: "29.2"; allowed: a number'),
    "a metric": ("{mIoU: 29.2", "{mIuO: 29.2", 'a key of targets.table2.published.0.values: "mIuO"; allowed: mIoU, mAcc'),
    "a set": ("v2_threshold: 71.0", "v2_treshold: 71.0", 'values: "v2_treshold"; allowed: v2_matched_frequency, v2_thr'),
    "by": ("by: metric", "by: metrics", 'published.0.by: "metrics"; allowed: metric'),
    "a note of": ("notes: {sketch:", "notes: {scetch:", 'a key of .*notes: "scetch"; allowed: v2_matched_frequency'),
    "a published model": ("- {model: vit_small", "- {model: vit_smal", 'published.0.model: "vit_smal"; allowed: vit_small,'),
    "its mark": ("inferred: true", "infered: true", 'a key of targets.table1.published.0: "infered"; allowed: model, s'),
    "a mark": ("inferred: true", 'inferred: "yes"', 'published.0.inferred: "yes"; allowed: true, false'),
    "its field": (TABLE1, TABLE1.replace("n_last", "n_lst"), 'a key of targets.table1.published.0: "n_lst_blocks"'),
    "its field's value": (TABLE1, TABLE1.replace("4", "four"), 'n_last_blocks: "four"; allowed: a whole number, 1 or more'),
    "what is pooled": ("pooling: cls+mean", "pooling: csl+mean", 'pooling: "csl.mean"; allowed: cls, mean, max'),
    "its part": ("- {part: blocks read,", "- {part: blocks,", 'published.0.part: "blocks"; allowed: blocks read, weight'),
    "no part": ("- {part: blocks read,", "- {", "targets.table5.published.0: the key part is missing"),
    "a number twice": (
        "      - {model: vit_base, n_last_blocks: 1, pooling: cls+mean, value: 78.2,",
        "      - {model: vit_small, n_last_blocks: 4, pooling: cls, value: 78.2,",
        "targets.table1.published: vit_small, n_last_blocks: 4, pooling: cls: two numbers of paper; allowed: one",
    ),
    "a size": ("{width: 384", "{widht: 384", 'published.0.sizes: "widht"; allowed: width, backbone, head'),
    "a model twice": ("imagenet: [vit_small, vit_base,", "imagenet: [vit_small, vit_small,", 'models.imagenet.1: "vit_small"; al'),
    "a model": ("imagenet: [vit_small, vit_base,", "imagenet: [vit_smal, vit_base,", 'imagenet.0: "vit_smal"; allowed: vit_s'),
    "no model": ("{imagenet: [vim_base, vit_base, linear_vit_base], demo: [", "{imagenet: [], demo: [", "ranks.models.imagenet: .*; all"),
    "no models": ("models: {imagenet: [vim_small], demo: [vim_demo]}", "models: {}", "table5.models: {}; allowed: models for imagenet or demo"),
    "a target twice": ("  table2:\n", "  table1:\n", "the key 'table1' stands in line .* and in line .*; keep one"),
    "a key twice": ("kind: probe", "kind: probe\n    kind: dense", "the key 'kind' stands in line .*; keep one"),
    "a key of a target": ("compared: shown_auc", "compard: shown_auc", 'targets.figure6: "compard"; allowed: title, kind'),
    "an option of others": ("kind: ranks\n", "kind: ranks\n    pictures: 3\n", 'targets.ranks: "pictures"; allowed: title'),
    "a score": ("compared: shown_auc", "compared: auc_shown", 'compared: "auc_shown"; allowed: auc_of_mean_normalized, sh'),
    "a label": ("{label: ViT-S,", "{lable: ViT-S,", 'a key of models.vit_small: "lable"; allowed: label, mixer, training'),
    "no label": ("{label: ViT-S, ", "{", "models.vit_small: the key label is missing"),
    "an order": ("[[dinov2_small, dinov2_base,", "[[dino_small, dinov2_base,", 'imagenet.0.0: "dino_small"; allowed: dinov2'),
    "an order of one": ("[[vit_reg_demo, vit_demo]]", "[[vit_reg_demo]]", "demo.0: .*; allowed: a list of 2 or more"),
    "a token": ("{part: first}]", "{part: frist}]", 'imagenet.0.1.part: "frist"; allowed: first, register, patch'),
    "a change": ("{d_state: 16}", "{d_stat: 16}", 'a key of models.vim_demo_n16.changes: "d_stat"; allowed: img_size, .*d_state'),
    "a change's value": ("{d_state: 16}", "{d_state: big}", 'vim_demo_n16.changes.d_state: "big"; allowed: a number'),
    "what is varied": ("key: d_state", "key: d_sate", "targets.states.over: models.vim_demo_n16 says no d_sate"),
    "a family": ("{label: N = 16, family: Vim,", "{label: N = 16,", "targets.states.over: models.vim_demo_n16 says no family"),
    "a side": ("side: 48", "side: big", 'models.vit_demo_48px.side: "big"; allowed: a whole number, 1 or more'),
    "a kind": ("kind: probe", "kind: prob", 'targets.table1.kind: "prob"; allowed: bars, claims, .*, test'),
    "no kind": ("    kind: probe\n", "", "targets.table1: the key kind is missing"),
    "a task": ("tasks: [table1]", "tasks: [tabel1]", 'targets.table1.tasks.0: "tabel1"; allowed: probe, knn, auc'),
    "a probe": ("needs_probe: table1", "needs_probe: table7", 'tasks.table4.needs_probe: "table7"; allowed: probe, knn'),
    "a verb": ("config: knn, verb: validate", "config: knn, verb: valdate", 'knn.verb: "valdate"; allowed: fit, validate, test'),
    "a method": ("training: DINO, method: dino", "training: DINO, method: dion", 'vit_demo.method: "dion"; allowed: dino, sup'),
    "a task's YAML": ("config: knn,", "config: kn,", 'tasks.knn.config: "kn"; allowed: a file of configs/task: .*knn, '),
    "an overlay": ("overlay: pretrain", "overlay: pretrian", 'methods.dino.overlay: "pretrian"; allowed: .*pretrain'),
    "overlays": ("overlays: [ranks512, auc_both]", "overlays: [rank512]", 'states.overlays.0: "rank512"; allowed: ranks512'),
    "a kind of data": ("data: images}", "data: imges}", 'methods.dino.data: "imges"; allowed: images, masks, robustness'),
    "data": ("demo: {images: demo, masks", "demo: {imges: demo, masks", 'a key of data.demo: "imges"; allowed: held_out, im'),
    "a data set": ("  demo: {images", "  dmo: {images", 'a key of data: "dmo"; allowed: imagenet, demo'),
    "data's YAML": ("masks: demo_s,", "masks: demos,", 'data.demo.masks: "demos"; allowed: a file of configs/data: ade20k, channels'),
    "a backbone": ("backbone: vit_demo,", "backbone: vit_dem,", 'vit_demo_supervised.backbone: "vit_dem"; allowed: a file'),
    "no backbone": ("  vit_small: {label", "  vit_smal: {label", 'models.vit_smal, whose name is its backbone where.*: "vit_smal"'),
    "trained or not": ("training: none", "training: DINO", 'vit_base_random.training: "DINO"; allowed: none where method is'),
    "the paper": ("paper: [table1,", "paper: [tabel1,", 'paper.0: "tabel1"; allowed: table1, table2, .*figure4'),
    "the paper's part": ("figure4, figure5", "figur4, figure5", 'paper.9: "figur4"; allowed: table1'),
    "a data set of a target": ("default_data: demo", "default_data: dem", 'default_data: "dem"; allowed: demo'),
    "curves": ("curves: right", "curves: rihgt", 'figure1.curves: "rihgt"; allowed: none, right, below'),
    "pictures": ("pictures: 4", "pictures: 0", "figure1.pictures: 0; allowed: a whole number, 1 or more"),
    "a map": ("maps: [{kind: similarity}]", "maps: [{kind: similar}]", 'maps.0.kind: "similar"; allowed: similarity, mixing'),
    "no maps": ("    maps: [{kind: similarity}]\n", "", "targets.figure1: the key maps is missing"),
    "halves": ("top: {imagenet: [vit_base,", "top: {imagenet: [vitbase,", 'top.imagenet.0: "vitbase"; allowed: vit_base'),
    "a claim": ("of: [probe, knn, auc]}", "of: [prob, knn, auc]}", 'claims.3.of.0: "prob"; allowed: probe, knn'),
    "a claim's model": ("higher: mambar_demo", "higher: mambar", 'claims.3.higher: "mambar"; allowed: vit_demo'),
    "the reference": ("reference: vit_demo", "reference: vit", 'targets.study.reference: "vit"; allowed: vit_demo'),
    "a recipe": ("model.min_lr: 1.0e-6", "model.min_lr: 1e-6", 'recipe.model.min_lr: "1e-6"; allowed: a number'),
    "a remark": ("    remarks: *mixers", "    remarks: a word", 'remarks: "a word"; allowed: a list'),
    "a section": ("paper: [table1,", "papers: [table1,", 'a key: "papers"; allowed: data, methods, tasks, models, targets, p'),
    "YAML": ("paper: [table1,", "paper: [[table1,", "while parsing a flow sequence"),
    "a model that is null": ("  vit_small: {label: ViT-S, family: ViT, mixer: softmax, training: DINO}", "  vit_small:",
                            "models.vit_small: null; allowed: keys and values"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_said(what, tmp_path):
    old, new, words = WRONG[what]
    with pytest.raises(ValueError, match=f"^experiments/paper.yaml: .*{words}") as caught:
        paper.load(write(tmp_path, (old, new)))
    assert "\n" not in str(caught.value)


def places(value, path=()):
    """Where something stands in a file."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield (*path, key)
        yield from places(value[key], (*path, key))


def put(value, path, new):
    """The same with something else in one place."""
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = put(value[path[0]], path[1:], new)
    return copy


@pytest.mark.parametrize("new", [None, 5, "x", [], [[]], {}, {"x": None}, {5: 5}, True])
def test_whatever_stands_there_no_check_fails_itself(new):
    refused = 0
    every = list(places(spec.content()))
    for path in every[::STRIDE]:
        try:
            paper.check(put(spec.content(), path, new))
        except ValueError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > len(every[::STRIDE]) / 2


@pytest.mark.parametrize("content", ["", "5", "[1]", "a: 1"])
def test_what_is_no_such_file(content, tmp_path):
    path = tmp_path / "paper.yaml"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"(the file: .*; allowed: keys and values|a key: .* allowed: data)"):
        paper.load(path)


def test_what_is_right_is_taken_as_it_is(tmp_path):
    assert paper.load(write(tmp_path)) == yaml.safe_load(WHOLE) == spec.content()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("seeds: [0, 1, 2, 3, 4]", "seeds: [7]"),
        ("default_runs: study", "default_runs: {demo: mine}"),
        ("overlays: [places, knn_both, auc]", "overlays: true"),
        ("pooling: cls, value: 77.0", "pooling: cls+register3, stream: branch, value: 77"),
        ("value: 77.0, source: paper, inferred: true", "value: 77.0, source: elsewhere, inferred: false"),
        ("  vit_small: {", "  mine: {backbone: vit_small, label: M, mixer: own, training: MAE}\n  vit_small: {"),
    ],
)
def test_what_people_may_change(old, new, tmp_path):
    paper.load(write(tmp_path, (old, new)))


def test_names_are_those_of_the_code():
    """Lists that stand in experiments, since the code that they are of brings torch."""
    assert paper.kinds() == renderers.kinds()
    assert set(paper.HEAD) == set(HEAD_FIELDS)
    assert set(paper.MAPS) == set(figure_pages.KINDS) and set(paper.TOKENS) == set(figure_pages.TOKENS)
    assert set(paper.DATASETS) == set(figure_pages.DATA)
    assert set(paper.SCORES) == {figure_pages.SCORE, *statements.MAPS}
    assert set(paper.STUDY_METRICS) == set(study_values.METRICS)
    assert set(paper.SWEEP_TASKS) == set(sweeps._READERS)


@pytest.mark.parametrize("kind", paper.kinds())
def test_every_kind_knows_its_keys(kind):
    entry = {"title": "t", "kind": kind, "tasks": [], "models": {"demo": ["vim_demo"]}, "unknown": 1}
    with pytest.raises(ValueError, match=r'a key of targets\.t: "unknown"; allowed: '):
        paper._check_target("targets.t", entry, spec.content())


def test_a_kind_of_other_people(monkeypatch):
    monkeypatch.setattr(paper, "kinds", lambda: ["mine"])
    entry = {"title": "t", "kind": "mine", "tasks": [], "models": {"demo": ["vim_demo"]}, "unknown": 1}
    paper._check_target("targets.t", entry, spec.content())
    with pytest.raises(ValueError, match=r"targets\.t\.seeds: 3; allowed: a list"):
        paper._check_target("targets.t", entry | {"seeds": 3}, spec.content())


def test_the_command_says_it_in_one_line_before_anything_runs(tmp_path):
    path = write(tmp_path, ("seeds: [0, 1, 2, 3, 4]", "seeds: five"))
    code = (
        f"import runpy, pathlib; from experiments import spec; spec.PATH = pathlib.Path({str(path)!r});"
        "runpy.run_module('experiments', run_name='__main__', alter_sys=True)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "study", f"--runs={tmp_path}/runs"], cwd=Path(configs.ROOT).parent,
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1 and not done.stdout and not (tmp_path / "runs").exists()
    assert done.stderr == 'error: experiments/paper.yaml: targets.study.seeds: "five"; allowed: a list\n'


@pytest.mark.parametrize(
    ("check", "right", "wrong", "words"),
    [
        (number(), [0, -1.5, 10**9], [True, "1", None, float("nan"), float("inf"), [1]], "allowed: a number$"),
        (number(1, whole=True), [1, 7], [0, 1.5, True, "1"], "allowed: a whole number, 1 or more"),
        (number(0, 1), [0, 0.5, 1], [-0.1, 1.1], "allowed: a number from 0 to 1"),
        (text, ["a"], ["", "  ", None, 1], "allowed: text"),
        (flag, [True, False], [0, 1, "true", None], "allowed: true, false"),
        (null_or(text), [None, "a"], [1], "allowed: text"),
        (list_of(text, least=1), [["a", "b"]], ["a", [], ["a", "a"], [1], None], "allowed: "),
        (either(dict, keys({"a": text}), text), ["b", {"a": "b"}], [1, {"a": 1}], "allowed: text"),
        (keys({"a": text}, {"b": flag}), [{"a": "x"}, {"a": "x", "b": True}], [{"a": "x", "c": 1}, 5], "allowed: "),
        (keys({"a": text}), [{"a": "x"}], [{}], "k: the key a is missing"),
    ],
)
def test_checks(check, right, wrong, words):
    for value in right:
        check(value, "k")
    for value in wrong:
        with pytest.raises(ValueError, match=words) as caught:
            check(value, "k")
        assert re.match(r"(a key of )?k[.:]", str(caught.value))
