"""macOS, MPS and Windows, by taking away what they do not have."""

import ast
import os
import pickle
import re
import subprocess
import sys
from multiprocessing.reduction import ForkingPickler

import pytest
import torch

import configs
from backbones import LinearVisionTransformer, MambaReg, MambaRegMamba1, VimMamba1, VisionMamba, VisionTransformer
from common import native
from common.precision import exact
from datamodules import ImageNetDataModule, ImageNetSDataModule, RobustnessDataModule, RobustnessSet
from datamodules.prepare import demo_robustness
from lightning_modules import DINO
from metrics import BinaryAUC, KNNAccuracy, binary_auc
from tests.lightning_modules.test_dino import batches
from tests.tiny_runs import ROOT

WITHOUT = """
import multiprocessing, os, signal, sys
import lightning, select, timm, torch.multiprocessing, torchvision, webdataset  # theirs is what they do on Linux
import multiprocessing.popen_spawn_posix, multiprocessing.resource_tracker, multiprocessing.util, subprocess
system, *ours = sys.argv[1:]
for name in ("sigwaitinfo", "sigtimedwait"):
    delattr(signal, name)
for name in ("sched_getaffinity", "sched_setaffinity", "posix_fadvise", "O_DIRECT"):
    delattr(os, name)
if system == "windows":
    # pthread_sigmask and SIGUSR1 stay: multiprocessing and Lightning ask for them where they do not see Windows
    for name in ("fcntl", "resource", "pwd", "grp", "termios"):
        sys.modules[name] = None
    for name in sorted(set(filter(str.islower, dir(os))) - OF_WINDOWS):
        if not name.startswith("_"):
            delattr(os, name)
    def of_sockets(*files):
        raise OSError(10038, "an operation was attempted on something that is not a socket")
    select.select = of_sockets
if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    from pathlib import Path
    from tests.tiny_runs import run
    run("fit", "dino", *map(Path, ours), "vit", "--data.init_args.num_workers", "2", "--trainer.max_epochs", "1")
    from common import native
    assert native.loaded, "no C was compiled"
"""
OF_WINDOWS = """abc _exit abort access add_dll_directory altsep chdir chmod close closerange cpu_count curdir defpath device_encoding
devnull dup dup2 environ error execl execle execlp execlpe execv execve execvp execvpe extsep fdopen fsdecode
fsencode fspath fstat fsync ftruncate get_exec_path get_handle_inheritable get_inheritable get_terminal_size getcwd
getcwdb getenv getlogin getpid getppid isatty kill linesep link listdir listdrives listmounts listvolumes lseek
lstat makedirs mkdir name open pardir path pathsep pipe popen process_cpu_count putenv read readlink remove
removedirs rename renames replace rmdir scandir sep set_handle_inheritable set_inheritable spawnl spawnle spawnv
spawnve st startfile stat stat_result statvfs_result strerror supports_bytes_environ supports_dir_fd
supports_effective_ids supports_fd supports_follow_symlinks symlink sys system terminal_size times times_result
truncate umask uname_result unlink unsetenv urandom utime waitpid waitstatus_to_exitcode walk write"""
"""What the documentation of os says of Windows, names in small letters."""


OLD = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PYTHONIOENCODING": "cp1252"}
"""Text is no UTF-8 where nobody says so."""


@pytest.mark.parametrize("system", ["macos", pytest.param("windows", marks=pytest.mark.slow)])
def test_a_run_with_workers_ends(system, shards, tmp_path):
    """Workers are spawned there, and nothing tells them who sent a signal."""
    script = tmp_path / "without.py"
    script.write_text(WITHOUT.replace("OF_WINDOWS", repr(set(OF_WINDOWS.split()))))
    done = subprocess.run(
        [sys.executable, str(script), system, str(shards), str(tmp_path)], cwd=tmp_path, text=True, capture_output=True,
        timeout=200, env=os.environ | {"PYTHONPATH": str(configs.ROOT.parent)} | (OLD if system == "windows" else {}),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "dino-vit/checkpoints/last.ckpt").is_file()


PRODUCT = [
    path
    for path in sorted(ROOT.rglob("*.py"))
    if path.relative_to(ROOT).parts[0] not in ("tests", "build") and not path.relative_to(ROOT).parts[0].startswith(".")
]
READERS = {"read_text", "write_text", "open", "fdopen", "NamedTemporaryFile", "TemporaryFile"}


def calls(path):
    return [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]


def test_text_files_name_their_encoding():
    """Windows takes another one where nobody says so."""
    assert len(PRODUCT) > 100
    silent = []
    for path in PRODUCT:
        for call in calls(path):
            name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            of = getattr(getattr(call.func, "value", None), "id", "")
            if (
                name not in READERS
                or of in ("Image", "tarfile", "os", "zipfile")
                or ast.unparse(call.func) == "self.shards.open"
            ):
                continue
            if name == "write_text" and isinstance(call.func, ast.Name):  # that of common/files.py
                continue
            modes = [a.value for a in [*call.args, *(k.value for k in call.keywords)] if isinstance(a, ast.Constant)]
            binary = any(isinstance(mode, str) and "b" in mode and set(mode) <= set("rwaxb+") for mode in modes)
            if not binary and "encoding" not in {k.arg for k in call.keywords} and name != "NamedTemporaryFile":
                silent.append(f"{path.relative_to(ROOT)}:{call.lineno}")
    assert not silent


def test_what_windows_lacks_is_asked_for_first():
    """``os.NAME`` in a file that also holds ``hasattr(os, "NAME")``; the signals of POSIX and its modules likewise."""
    lacking = []
    for path in PRODUCT:
        if path.is_relative_to(ROOT / "benchmarks"):
            continue
        text = path.read_text(encoding="utf-8")
        for module, name in set(re.findall(r"\b(os|signal)\.([A-Za-z_]+)\b", text)):
            there = {*OF_WINDOWS.split(), *CAPITALS} if module == "os" else SIGNALS_OF_WINDOWS
            asked = f'attr({module}, "{name}"' in text or (
                module == "signal" and f'attr(signal, "{WITH.get(name)}"' in text
            )
            if name not in there and not asked:
                lacking.append(f"{path.relative_to(ROOT)}: {module}.{name}")
        for name in re.findall(r"^import (fcntl|resource|pwd|grp|termios|pty)\b", text, re.MULTILINE):
            lacking.append(f"{path.relative_to(ROOT)}: {name}, without except ImportError")
    assert not lacking


CAPITALS = {"O_RDONLY", "O_WRONLY", "O_RDWR", "O_CREAT", "O_EXCL", "W_OK", "R_OK", "PathLike", "SEEK_SET"}
SIGNALS_OF_WINDOWS = {
    "signal",
    "SIG_DFL",
    "SIGTERM",
    "SIGINT",
    "SIGABRT",
    "Signals",
    "default_int_handler",
    "getsignal",
}
WITH = {"SIGUSR1": "pthread_sigmask", "SIG_BLOCK": "pthread_sigmask", "SIG_SETMASK": "pthread_sigmask"}


def test_shards_and_kernels_without_what_windows_lacks(shards, tmp_path, monkeypatch):
    there = list(ImageNetDataModule(str(shards), view="knn", batch_size=5, num_workers=0).val_dataloader()[0])
    for name in ("pread", "getuid"):
        monkeypatch.delattr(os, name)
    again = list(ImageNetDataModule(str(shards), view="knn", batch_size=5, num_workers=0).val_dataloader()[0])
    assert all(torch.equal(a["image"], b["image"]) for a, b in zip(there, again, strict=True))
    monkeypatch.setenv("DINOMAMBA_CACHE", str(tmp_path))
    source = tmp_path / "one.c"
    source.write_text("int one(void) { return 1; }")
    if native.compiler() is not None:
        assert native._load(source, ()).one() == 1 and list((tmp_path / "native").glob("one-*.so"))


def datasets(shards, folder):
    """Of every kind of split and view."""
    more = {"num_workers": 0, "batch_size": 4}
    for view in ("multicrop", "probe", "knn"):
        data = ImageNetDataModule(str(shards), view=view, **more)
        if view == "knn":
            yield from (loader.dataset for loader in data.val_dataloader())
        else:
            yield data.train_dataloader().dataset
            yield data.val_dataloader().dataset
    yield (
        ImageNetDataModule(f"pipe:cat {shards}/{{name}}", view="probe", cache_dir=str(folder / "cache"), **more)
        .train_dataloader()
        .dataset
    )
    yield ImageNetSDataModule(str(shards), batch_size=4, num_workers=0).val_dataloader().dataset
    demo_robustness(str(folder / "sets"), per_class=1)
    sets = {"sketch": RobustnessSet("sketch", synsets=str(folder / "sets/classes.txt"))}
    (loader,) = RobustnessDataModule(str(folder / "sets"), sets, **more).val_dataloader()
    yield loader.dataset
    yield (
        ImageNetDataModule(str(folder / "sets/sketch"), train_shards=".", val_shards=None, **more)
        .train_dataloader()
        .dataset
    )


def test_a_spawned_worker_reads_alike(shards, tmp_path):
    """It gets a pickled copy, perhaps of a dataset that was read from before."""
    count = 0
    for dataset in datasets(shards, tmp_path):
        batches = iter(dataset)
        first = next(batches)
        copied = next(iter(pickle.loads(ForkingPickler.dumps(dataset))))
        assert first["key"] == copied["key"]
        images = [batch["crops"] if "crops" in batch else [batch["image"]] for batch in (first, copied)]
        assert all(map(torch.equal, *images)), dataset.split
        count += 1
    assert count == 10


class OnMPS(torch.Tensor):
    """A tensor of a device that has no float64, until it is brought to the CPU."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        found = super().__torch_function__(function, types, args, kwargs or {})
        name = getattr(function, "__name__", "")
        if name == "cpu":
            return found.as_subclass(torch.Tensor)
        for tensor in found if isinstance(found, tuple | list) else (found,):
            if isinstance(tensor, torch.Tensor) and tensor.dtype in (torch.float64, torch.complex128):
                raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        return found


def on_mps(module):
    """A module whose parameters are there."""
    for part in module.modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is not None:
                part._parameters[name] = torch.nn.Parameter(
                    parameter.detach().as_subclass(OnMPS), parameter.requires_grad
                )
        for name, buffer in list(part._buffers.items()):
            if buffer is not None:
                part._buffers[name] = buffer.as_subclass(OnMPS)
    return module


def test_exact_numbers_come_from_the_cpu():
    t = torch.arange(3).as_subclass(OnMPS)
    with pytest.raises(TypeError):
        t.double()
    assert type(exact(t)) is torch.Tensor and exact(t).dtype == torch.float64


def test_metrics():
    torch.manual_seed(0)
    scores, masks = torch.randn(5, 2, 6, 7), torch.randint(0, 2, (5, 12, 14))
    there = binary_auc(scores.as_subclass(OnMPS), masks.as_subclass(OnMPS))
    assert torch.equal(there, binary_auc(scores, masks))
    here, metric = BinaryAUC(2), BinaryAUC(2)
    here.update(scores, masks)
    for name in ("sum_auc", "sum_normalized", "images", "skipped"):
        setattr(metric, name, getattr(metric, name).as_subclass(OnMPS))
    metric.update(scores.as_subclass(OnMPS), masks.as_subclass(OnMPS))
    for name, value in here.compute().items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(metric.compute()[name].cpu())), name
    knn = KNNAccuracy(k=2)
    knn.update(torch.randn(9, 4).as_subclass(OnMPS), torch.randint(0, 3, (9,)).as_subclass(OnMPS))
    assert 0 <= float(knn.compute()["top1"]) <= 1


SMALL = dict(img_size=16, patch_size=4, embed_dim=16, depth=2)
FAMILIES = {
    "vit": lambda: VisionTransformer(**SMALL, num_heads=2),
    "linear_vit": lambda: LinearVisionTransformer(**SMALL, num_heads=2),
    "vim": lambda: VisionMamba(**SMALL, d_state=4, headdim=8),
    "mambar": lambda: MambaReg(**SMALL, d_state=4, headdim=8, num_registers=2),
    "vim_mamba1": lambda: VimMamba1(**SMALL, d_state=4),
    "mambar_mamba1": lambda: MambaRegMamba1(**SMALL, d_state=4, num_registers=2),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_of_dino(family):
    """Loss, gradients, EMA and centre, at two sizes of images."""
    torch.manual_seed(0)
    module = on_mps(DINO(FAMILIES[family](), out_dim=12, hidden_dim=8, bottleneck_dim=4))
    crops = [crop.as_subclass(OnMPS) for crop in batches(1)[0]["crops"]]
    with torch.no_grad():
        _, z = module.teacher(crops[:2])
        teacher = module.teacher.head.last_layer(z)
    _, z = module.student(crops)
    parts = module.loss.of_prototypes(z, module.student.head.last_layer.prototypes(), teacher, len(crops), 0.05)
    parts.loss.backward()
    module.loss.observe(teacher)
    module.after_update({"momentum": 0.9}, None)
    assert all(p.grad.isfinite().all() for p in module.student.parameters() if p.requires_grad)
