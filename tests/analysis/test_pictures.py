"""Pictures of a prediction: the images that were kept, beside the maps asked for."""

import numpy as np
import pytest
from PIL import Image

from analysis import pictures
from tests.tiny_runs import run


def test_of_a_prediction(shards, tmp_path, capsys):
    extra = ["--model.init_args.pictures", "11", "--model.init_args.maps", "[similarity, mixing]"]
    folder = run("predict", "binary_auc", shards, tmp_path, "vim", *extra)
    keys, images, maps = pictures.read(folder)
    assert len(keys) == len(images) == 11 and images.dtype == np.uint8 and images.shape[1:] == (16, 16, 3)
    assert all(len(values) == 11 and values.shape[1:] == (4, 4) for values in maps.values())
    pictures.main([str(folder), "--maps", "similarity", "--count", "3"])
    assert "similarity" in capsys.readouterr().out and Image.open(folder / "maps.png").width > 100
    with pytest.raises(ValueError, match="no map's name holds nothing; there are block0/similarity"):
        pictures.main([str(folder), "--maps", "nothing"])
    with pytest.raises(ValueError, match=r"has no predictions: run dinomamba predict .*--model.pictures"):
        pictures.main([str(tmp_path)])
