"""Files of weights: fetched, told apart by their content, and read without running code from them."""

import argparse
import re
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

_scalar = np.float64(0).__reduce__()[0]  # of numpy._core, which was numpy.core before numpy 2

# what published checkpoints hold beside tensors
_SAFE = [
    argparse.Namespace,
    np.dtype,
    np.ndarray,
    np.float64,
    np.float32,
    np.int64,
    type(np.dtype("float64")),
    type(np.dtype("float32")),
    type(np.dtype("int64")),
    _scalar,
    (_scalar, "numpy.core.multiarray.scalar"),
]

DAMAGED = "download or copy it again"
OTHERS = (
    (b"\x1f\x8b", "compressed by gzip: unpack it first"),
    (b"BZh", "compressed by bzip2: unpack it first"),
    (b"\xfd7zXZ", "compressed by xz: unpack it first"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd: unpack it first"),
    (b"7z\xbc\xaf", "a 7-Zip archive: unpack it first"),
    (b"version https://git-lfs", "a pointer of Git LFS and not the file itself: fetch that with git lfs pull"),
    (b"\x89HDF", "HDF5, as Keras writes it; wanted are PyTorch's .pth, .ckpt or .safetensors"),
    (b"\x93NUMPY", "an array of NumPy; wanted are PyTorch's .pth, .ckpt or .safetensors"),
    (b"\x89PNG", "a picture"),
    (b"\xff\xd8\xff", "a picture"),
)
"""What else is found where weights were expected, by its first bytes."""


def fetch(source: str | Path) -> Path:
    """The file behind a path or an ``hf://`` address (through huggingface_hub and its cache).

    Raises:
        ValueError: where there is no such file, or the hub cannot be reached and its cache does not have it.
    """
    if str(source).startswith("hf://"):
        return _fetch_from_hub(str(source))
    if re.match(r"https?://", str(source)):
        raise ValueError(f"{source} is a web address: download the file and give its path, or hf://owner/repo/file")
    path = Path(source).expanduser()
    if not str(source) or not path.is_file():
        what = "is empty" if not str(source) else "is a folder" if path.is_dir() else "is not there"
        raise ValueError(
            f"weights: {str(source)!r} {what}: give the path of a .pth, .ckpt or .safetensors file, "
            "hf://owner/repo/file, or the name of a timm model with published weights"
        )
    return path


def _fetch_from_hub(address: str) -> Path:
    from huggingface_hub import hf_hub_download

    where, _, revision = address.removeprefix("hf://").partition("@")
    owner, _, rest = where.partition("/")
    repo, _, file = rest.partition("/")
    if not (owner and repo and file):
        raise ValueError(f"{address} is no address of a file: write hf://owner/repo/file, or hf://owner/repo/file@rev")
    try:
        return Path(hf_hub_download(f"{owner}/{repo}", file, revision=revision or None))
    except Exception as error:  # the hub's own errors, and any that its HTTP client raises without a network
        raise ValueError(
            f"{address} is neither in huggingface_hub's cache nor to be had from the hub ({type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else 'no message'}); without a network, download the file "
            "elsewhere and give its path, or point HF_HOME at a cache that holds it"
        ) from None


def _what_else(path: Path) -> str | None:
    """In words, what a file is that cannot be weights; None where it may be."""
    with path.open("rb") as file:
        head = file.read(512)
    if not head:
        return f"empty: {DAMAGED}"
    if (other := next((text for magic, text in OTHERS if head.startswith(magic)), None)) is not None:
        return other
    if head.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        return "a web page, as a download leaves that wanted a log-in or another address: download it again"
    if head.startswith(b"PK") and not zipfile.is_zipfile(path):
        return f"cut short: {DAMAGED}"
    if head.startswith(b"PK"):
        with zipfile.ZipFile(path) as archive:
            if not any(name.endswith("data.pkl") for name in archive.namelist()):
                return "a zip archive of something else: unpack it first"
    elif tarfile.is_tarfile(path) and head[257:262] == b"ustar":
        return "a tar archive: unpack it first"
    return None


def is_safetensors(path: Path) -> bool:
    """By its content, whatever its name: the length of a header of JSON, and the header."""
    with path.open("rb") as file:
        head = file.read(9)
    return len(head) == 9 and head[8:] == b"{" and int.from_bytes(head[:8], "little") < path.stat().st_size


def read(path: str | Path, mmap: bool = False) -> dict[str, Any]:
    """A file's content, on the CPU; tensors stay in the file with ``mmap``, where its format allows it.

    ValueError where it is missing, damaged, of another format, or would run code.
    """
    path = fetch(path)
    if (other := _what_else(path)) is not None:
        raise ValueError(f"{path} cannot be read as weights: it is {other}")
    try:
        if is_safetensors(path):
            return load_file(path)
        with torch.serialization.safe_globals(_SAFE):
            if mmap and zipfile.is_zipfile(path) and path.suffix != ".safetensors":
                content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            else:
                with path.open("rb") as file:  # of a path torch would believe the suffix
                    content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # the unpickler and zip reader raise many types
        raise ValueError(f"{path} cannot be read as weights: {_reason(error)}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, wanted a dict of tensors or a checkpoint")
    return content


def _reason(error: Exception) -> str:
    """torch's reason without its advice, which is to run what the file says."""
    text = str(error)
    found = re.search(r"Unsupported (?:global: GLOBAL|class|operand) ?(\S+)", text)
    if found:
        return f"beside tensors it holds {found[1]}, which would run code; where it is trusted, save state_dict() alone"
    if isinstance(error, EOFError | OSError) or "PytorchStreamReader" in text:
        return f"it is damaged or cut short ({type(error).__name__}): {DAMAGED}"
    return f"it is no file of PyTorch's, or damaged ({type(error).__name__})"
