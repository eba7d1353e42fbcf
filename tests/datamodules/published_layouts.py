"""ADE20K and COCO as they are published, in small; and what shards of them hold."""

import json

import numpy as np
import webdataset as wds
from PIL import Image
from pycocotools import mask as run_length

CATEGORIES = [{"id": 18, "name": "dog"}, {"id": 3, "name": "car"}, {"id": 7, "name": "train"}]
"""Not in the order of their ids, which is that of the labels: car, train, dog."""


def save_jpg(path, size, seed=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)).save(path)


def save_map(path, size, seed=0, highest=150):
    path.parent.mkdir(parents=True, exist_ok=True)
    values = np.random.default_rng(seed).integers(0, highest + 1, (size[1], size[0]), dtype=np.uint8)
    Image.fromarray(values).save(path)


def ade20k_tree(root, training=5, validation=3):
    """``ADEChallengeData2016`` with the first four classes' names of 150."""
    for split, short, count in (("training", "train", training), ("validation", "val", validation)):
        for i in range(count):
            size = 30 + i, 24 + 2 * i
            save_jpg(root / "images" / split / f"ADE_{short}_{i + 1:08d}.jpg", size, i)
            save_map(root / "annotations" / split / f"ADE_{short}_{i + 1:08d}.png", size, i)
    return root


def object_info(root, names):
    rows = [f"{number + 1}\t0.1\t10\t1\t\t{name}" for number, name in enumerate(names)]
    (root / "objectInfo150.txt").write_text("\n".join(["Idx\tRatio\tTrain\tVal\t\tName", *rows, ""]))


def objects(number, image, size, count, rng):
    """Polygons of one or two parts, with boxes and areas of their own."""
    for i in range(count):
        parts = []
        for _ in range(1 + i % 2):
            x, y = rng.uniform(0, size[0] * 0.6), rng.uniform(0, size[1] * 0.6)
            w, h = rng.uniform(4, size[0] * 0.4), rng.uniform(4, size[1] * 0.4)
            parts.append([round(v, 2) for v in (x, y, x + w, y, x + w, y + h, x + w / 3, y + h)])
        rle = run_length.merge(run_length.frPyObjects(parts, size[1], size[0]))
        yield {
            "id": number + i, "image_id": image, "category_id": CATEGORIES[int(rng.integers(3))]["id"], "iscrowd": 0,
            "segmentation": parts, "area": float(run_length.area(rle)), "bbox": run_length.toBbox(rle).tolist(),
        }  # fmt: skip


def coco_data(sizes, counts, seed=0):
    """A file of instances for images of these (width, height), with so many annotations each."""
    rng = np.random.default_rng(seed)
    images, annotations = [], []
    for i, (size, count) in enumerate(zip(sizes, counts, strict=True)):
        number = 100 + 7 * i
        images.append({"id": number, "file_name": f"{number:012d}.jpg", "width": size[0], "height": size[1]})
        annotations += objects(1000 + len(annotations), number, size, count, rng)
    return {"info": {}, "licenses": [], "images": images, "categories": CATEGORIES, "annotations": annotations}


def coco_tree(root, data, split="train2017"):
    for image in data["images"]:
        save_jpg(root / split / image["file_name"], (image["width"], image["height"]), image["id"])
    path = root / "annotations" / f"instances_{split}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data))
    return path


def crowd(number, image, size, compressed=False):
    """A crowd that covers the left third, as a run length of numbers."""
    bitmap = np.zeros((size[1], size[0]), np.uint8, order="F")
    bitmap[:, : size[0] // 3] = 1
    first = int(bitmap.sum())
    rle = {"size": [size[1], size[0]], "counts": [0, first, bitmap.size - first]}
    if compressed:
        rle = run_length.encode(bitmap)
        rle["counts"] = rle["counts"].decode()
    return {
        "id": number, "image_id": image, "category_id": 3, "iscrowd": 1, "segmentation": rle, "area": first,
        "bbox": [0, 0, size[0] // 3, size[1]],
    }  # fmt: skip


def samples_of(out, split):
    """By key, as another reader sees them."""
    info = json.loads((out / "_info.json").read_text())["splits"][split]
    found = list(wds.WebDataset([str(out / name) for name in info["filenames"]], shardshuffle=False))
    assert len(found) == info["num_samples"]
    return {sample["__key__"]: sample for sample in found}


def clear(folder):
    for path in folder.iterdir():
        path.unlink()
