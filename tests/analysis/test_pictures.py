"""Pictures of a prediction: the images that were kept, beside the maps asked for."""

import numpy as np
import pytest
from PIL import Image

from analysis import pictures
from common.files import write_text
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


@pytest.mark.filterwarnings("ignore:Glyph")
def test_names_that_are_no_text(tmp_path):
    """File names are bytes; and what is between dollars is no formula."""
    names = [b"caf\xe9.jpg".decode("utf-8", "surrogateescape"), "$\\frac$.jpg", "a\nb\t.jpg", "\u732b.jpg"]
    (tmp_path / "predictions").mkdir()
    zeros = {"images": np.zeros((4, 8, 8, 3), np.uint8), "maps/m": np.zeros((4, 2, 2), np.float32)}
    np.savez(tmp_path / "predictions/rank0-batch000000.npz", key=np.array(names), **zeros)
    assert pictures.draw(tmp_path, tmp_path / "maps.svg", [], 4) == ["m"]
    assert [pictures.printable(name) for name in names[:3]] == ["caf\ufffd.jpg", "$\\frac$.jpg", "a\ufffdb\ufffd.jpg"]
    write_text(tmp_path / "table.csv", names[0])
    assert (tmp_path / "table.csv").read_text() == "caf\\udce9.jpg"
