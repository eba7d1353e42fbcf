"""What every room may use: collectives, atomic writes, memory, half to float32, the C compiler's loader."""

from importlib.util import find_spec
from pathlib import Path

PACKAGES = (
    "analysis", "backbones", "callbacks", "configs", "datamodules", "experiments", "heads", "lightning_modules",
    "metrics",
)  # fmt: skip
"""Those beside this one."""


def check_packages() -> None:
    """ImportError where a file or folder of somebody else's takes the place of one of our packages."""
    ours = Path(__file__).resolve().parents[1]
    for name in PACKAGES:
        spec = find_spec(name)
        places = [] if spec is None else [spec.origin] if spec.origin else list(spec.submodule_search_locations or ())
        for place in places:
            path = Path(place or "").resolve()
            if ours / name not in (path, path.parent):
                raise ImportError(
                    f"{place} takes the place of dinomamba's package {name!r}: rename it, or start from another folder "
                    "(what is on PYTHONPATH comes first too)"
                )


check_packages()
