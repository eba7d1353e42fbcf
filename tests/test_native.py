"""C compiled at first use: kept, shared by processes, replaced by Python where it cannot be had."""

import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from common import native
from datamodules import multicrop, views

ROOT = Path(__file__).parents[1]
TEXT = "int twice(int x) { return 2 * x; }\n"


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setenv("DINOMAMBA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(native, "loaded", [])
    path = tmp_path / "twice.c"
    path.write_text(TEXT)
    native.library.cache_clear()
    yield path
    native.library.cache_clear()


def kept(tmp_path):
    return sorted((tmp_path / "cache/native").iterdir())


needs_compiler = pytest.mark.skipif(native.compiler() is None, reason="no C compiler")


@needs_compiler
def test_compiled_once_for_each_text_and_flag(source, tmp_path, monkeypatch):
    assert native.library(source).twice(21) == 42 and native.loaded == ["twice.c"]
    (first,) = kept(tmp_path)
    native.library.cache_clear()
    monkeypatch.setenv("CC", "no-such-compiler")  # another process finds what is there
    assert native.library(source).twice(4) == 8
    monkeypatch.delenv("CC")
    source.write_text(TEXT.replace("2 *", "3 *"))
    native.library.cache_clear()
    assert native.library(source).twice(1) == 3 and len(kept(tmp_path)) == 2 and first.exists()
    assert native.library(source, "-DX=1") is not None and len(kept(tmp_path)) == 3
    monkeypatch.setattr(native, "_processor", lambda: "another")
    native.library.cache_clear()
    assert native.library(source).twice(1) == 3 and len(kept(tmp_path)) == 4


@needs_compiler
def test_processes_at_once(source, tmp_path):
    code = f"import pathlib; from common import native; print(native.library(pathlib.Path({str(source)!r})).twice(5))"
    command = [sys.executable, "-c", code]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(3)]
    assert [process.communicate(timeout=120)[0].strip() for process in processes] == ["10"] * 3
    assert len(kept(tmp_path)) == 1


@needs_compiler
def test_a_damaged_library_is_made_anew(source, tmp_path):
    assert native.library(source).twice(3) == 6
    (path,) = kept(tmp_path)
    path.unlink()
    path.write_bytes(b"")  # as after a power cut
    native.library.cache_clear()
    assert native.library(source).twice(3) == 6


@needs_compiler
def test_what_does_not_compile_is_said_and_nothing_is_kept(source, tmp_path):
    source.write_text("int twice(int x) { return y; }\n")
    with pytest.warns(UserWarning, match=r"(?s)twice.c cannot be compiled.*y.*undeclared.*DINOMAMBA_NATIVE=0"):
        assert native.library(source) is None
    assert not kept(tmp_path)


def test_no_compiler(source, monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.warns(UserWarning, match="no C compiler is found.*name it in CC"):
        assert native.library(source) is None


def test_a_folder_of_somebody_else_is_not_used(source, tmp_path, monkeypatch):
    folder = tmp_path / "cache/native"
    folder.mkdir(parents=True)
    monkeypatch.setattr(native.os, "getuid", lambda: 12345)
    assert native._folder() != folder


def test_switched_off_the_views_are_pythons(monkeypatch):
    monkeypatch.setenv("DINOMAMBA_NATIVE", "0")
    native.library.cache_clear()
    views.renderer.cache_clear()
    image = np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            crops = multicrop.MultiCrop(multicrop.MultiCropConfig(global_size=16, local_size=8, num_local=2))
        assert views.renderer() is None
        drawn, out = (
            crops.draw(50, 40, 0, 0, 3),
            [np.empty((3, kind.size, kind.size), np.uint8) for kind in crops.kinds],
        )
        multicrop.render_in_python(image, drawn, out)
        for ours, python in zip(crops(image, 0, 0, 3), out, strict=True):
            assert np.array_equal(ours, python)
    finally:
        native.library.cache_clear()
        views.renderer.cache_clear()


@needs_compiler
def test_a_changed_header_is_compiled_anew(source, tmp_path):
    """Those that a header includes count too."""
    source.write_text('#include "outer.h"\nint twice(int x) { return FACTOR * x; }\n')
    (source.parent / "outer.h").write_text('#include "inner.h"\n')
    for number in (2, 3):
        (source.parent / "inner.h").write_text(f"#define FACTOR {number}\n")
        native.library.cache_clear()
        assert native.library(source).twice(7) == 7 * number
    assert [path.name for path in native.headers(source)] == ["inner.h", "outer.h"]
