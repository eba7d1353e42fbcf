"""Shards that were made to harm, and what is read of good ones."""

import io
import resource
import struct
import tarfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from datamodules import Position, Transform
from datamodules.dataset import ShardDataset
from datamodules.loaders import ResumableLoader
from datamodules.samples import ShardError
from datamodules.shards import ShardSet
from datamodules.span_plan import EpochSegment, resume_plan
from tests.datamodules.test_shards import consume, png


def claiming(width, height):
    """A PNG of a few bytes whose header claims more."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(b"\0" * 64)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def eps():
    buffer = io.BytesIO()
    Image.new("RGB", (20, 20)).save(buffer, "EPS")
    return buffer.getvalue()


MEMBERS = {
    "a JSON of 100 MB": ("json", lambda: b" " * 100_000_000, r"its .json has 100000000 bytes, at most 1048576 are allowed"),
    "a class of 100 MB": ("cls", lambda: b"1" * 100_000_000, r"its .cls has 100000000 bytes"),
    "10^10 pixels": ("png", lambda: claiming(100_000, 100_000), "DecompressionBombError"),
    "another format": ("png", eps, "is PostScript"),
}  # fmt: skip


@pytest.mark.parametrize("what", MEMBERS)
def test_what_is_too_large_is_refused(what, tmp_path):
    field, make, words = MEMBERS[what]
    with tarfile.open(tmp_path / "val-0000.tar", "w") as tar:
        for key in ("good", "evil", "other"):
            members = {"png": png(np.zeros((20, 20, 3), np.uint8)), "cls": b"1"}
            if key == "evil":
                members[field] = make()
            for name, data in members.items():
                member = tarfile.TarInfo(f"{key}.{name}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    members = None
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ShardError, match=words) as error:
        consume(tmp_path)
    assert "'evil' in shard" in str(error.value) and "val-0000.tar" in str(error.value)
    batches = consume(tmp_path, policy="skip")
    assert [key for b in batches for key in b["key"]] == ["good", "other"]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KiB


class BytesRead(Transform):
    """Shows what this process has read, by the system's own count, since the plan was made."""

    fields = ("jpg", "cls")
    start = 0

    @staticmethod
    def total():
        return int(Path("/proc/self/io").read_text().split()[1])  # rchar

    def __call__(self, raw, key, rows):
        return {"read": BytesRead.total() - BytesRead.start}

    def empty(self):
        return {}


def test_a_resume_late_in_an_epoch_reads_two_shards_at_most(tmp_path):
    """At 90 % of an epoch of 1,000 shards, in each of two workers, for its first batch."""
    per_shard, size = 5, 30_000
    blob = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8).tobytes()
    for number in range(1000):
        with tarfile.open(tmp_path / f"train-{number:04d}.tar", "w") as tar:
            for i in range(per_shard):
                for field, data in (("jpg", blob), ("cls", b"0")):
                    member = tarfile.TarInfo(f"{number}_{i}.{field}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    shards = ShardSet(sorted(tmp_path.glob("*.tar")), [per_shard] * 1000)
    shard = shards.paths[0].stat().st_size
    batch, epoch = 4, 2

    def plan(epoch, done):
        BytesRead.start = BytesRead.total()
        return resume_plan(shards, batch, 0, 1, 0, epoch, per_shard, done)

    loader = ResumableLoader(
        ShardDataset(shards, BytesRead(), plan, 0), Position(epoch=epoch, batches=1125), batch, 2, 1
    )
    loader.load_state_dict({"epoch": epoch, "parts": [EpochSegment(1, batch, 1125)]})
    batches = iter(loader)
    first = [next(batches), next(batches)]
    whole = plan(epoch, ())
    for number, found in enumerate(first):
        numbers = whole.batch(1125 + number)
        assert found["key"] == [f"{shards.locate(i)[0]}_{shards.locate(i)[1]}" for i in numbers]
        assert 0.7 * shard < found["read"][-1] <= 2 * shard
    assert len(list(batches)) == 1250 - 1125 - 2
