"""The program under a name that is nobody else's: ``dinomamba`` and ``python -m dinomamba`` start here."""

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

MODULES = (
    "analysis", "backbones", "callbacks", "cli", "common", "configs", "datamodules", "experiments", "heads",
    "lightning_cli", "lightning_modules", "metrics",
)  # fmt: skip
"""Those beside this one."""


def check_modules() -> None:
    """ImportError where a file or folder of somebody else's takes the place of one of our modules."""
    ours = Path(__file__).resolve().parent
    for name in MODULES:
        spec = find_spec(name)
        places = [] if spec is None else [spec.origin] if spec.origin else list(spec.submodule_search_locations or ())
        for place in places:
            path = Path(place or "").resolve()
            if not {ours / name, ours / f"{name}.py"} & {path, path.parent}:
                raise ImportError(
                    f"{place} takes the place of dinomamba's own {name!r}: rename it, or start from another folder "
                    "(what is on PYTHONPATH comes first too)"
                )


def main() -> None:
    """See :func:`cli.main`."""
    try:
        check_modules()
    except ImportError as error:
        sys.exit(f"error: {error}")
    import_module("cli").main()  # which is ours now


if __name__ == "__main__":
    main()
