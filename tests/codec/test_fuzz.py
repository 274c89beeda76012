"""Twenty thousand mutated files, in processes of their own: none may crash, hang or grow."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

FILES, PROCESSES = 20_000, 2


def test_mutated_files_are_refused_by_a_typed_error_or_decode_exactly() -> None:
    share = str(FILES // PROCESSES)
    script = str(Path(__file__).with_name("fuzz.py"))
    running = [
        subprocess.Popen(
            [sys.executable, script, share, str(seed)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in range(1, PROCESSES + 1)
    ]
    counts: Counter[str] = Counter()
    try:
        for process in running:
            said, complaint = process.communicate(timeout=280)
            assert process.returncode == 0, complaint[-3000:]
            counts.update(json.loads(said))
    finally:
        for process in running:
            process.kill()
            process.communicate()

    assert counts["files"] == FILES
    assert counts["MalformedObject"] > FILES / 2
    assert counts["DigestMismatch"] > FILES / 50
