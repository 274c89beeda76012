"""`make bench`, or `python -m bench codec speed`: run the measurements, each in its own process."""

import argparse
import subprocess
import sys

PARTS = (
    "codec",
    "download",
    "speed",
    "apply",
    "growth",
    "memory",
    "plots",
    "streams",
    "sandboxes",
    "sessions",
    "learning",
    "staleness",
)


def main() -> int:
    """Exit code of the first part that failed, 0 when all went well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help="default: all")
    for part in parser.parse_args().parts or PARTS:
        print(f"== {part}", flush=True)
        code = subprocess.call([sys.executable, "-m", f"bench.{part}"])
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
