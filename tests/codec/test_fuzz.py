"""Twenty thousand mutated files, in a process of its own: it must not crash, hang or grow."""

import json
import subprocess
import sys
from pathlib import Path

FILES = 20_000


def test_mutated_files_are_refused_by_a_typed_error_or_decode_exactly() -> None:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("fuzz.py")), str(FILES), "1"],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )

    assert done.returncode == 0, done.stderr[-3000:]
    counts = json.loads(done.stdout)
    assert counts["MalformedObject"] > FILES / 2
    assert counts["DigestMismatch"] > FILES / 50
