"""Lay out one service's build context for a Space: `python spaces/stage.py NAME TARGET`.

The result has the Dockerfile and README.md at its top and the same relative tree beside them that
the repository has, so the image of a Space is the image of compose.
"""

import argparse
import shutil
import sys
from pathlib import Path

SERVICES = ("trainer", "inference", "environment")
_IGNORED = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", ".*_cache")


def stage(name: str, target: Path, *, root: Path) -> list[Path]:
    """Copy what the image of a service needs into `target`, which must be empty or absent.

    Returns the files, relative to `target`, sorted. Raises ValueError for an unknown service or a
    target with something in it.
    """
    if name not in SERVICES:
        raise ValueError(f"{name!r} is not a service; choose one of {', '.join(SERVICES)}")
    if target.exists() and any(target.iterdir()):
        raise ValueError(f"{target} is not empty; remove it or choose another folder")
    target.mkdir(parents=True, exist_ok=True)
    for file in ("Dockerfile", "README.md"):
        shutil.copy2(root / "spaces" / name / file, target / file)
    shutil.copy2(root / "constraints.txt", target / "constraints.txt")
    folders = ["shared", f"services/{name}", *(["jobs"] if name == "environment" else [])]
    for folder in folders:
        shutil.copytree(root / folder, target / folder, ignore=_IGNORED)
    return sorted(path.relative_to(target) for path in target.rglob("*") if path.is_file())


def main(argv: list[str] | None = None) -> int:
    """Stage and say what was laid out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("name", choices=SERVICES)
    parser.add_argument("target", type=Path)
    options = parser.parse_args(argv)
    try:
        files = stage(options.name, options.target, root=Path(__file__).resolve().parent.parent)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    total = sum((options.target / file).stat().st_size for file in files)
    print(f"{len(files)} files, {total / 1e6:.2f} MB in {options.target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
