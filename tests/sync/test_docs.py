"""docs/own-loop.md, run block by block as a reader would."""

import re
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "own-loop.md"
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_page_on_ones_own_loop_runs_from_top_to_bottom(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("accelerate")
    text = PAGE.read_text().replace("/tmp/weights", f"{tmp_path}/weights")
    blocks = _BLOCK.findall(text)
    assert len(blocks) == 5
    names: dict[str, object] = {"__name__": "page"}
    for number, block in enumerate(blocks, start=1):
        exec(compile(block, f"{PAGE.name}, block {number}", "exec"), names)

    assert "is finished" in capsys.readouterr().out
    assert "deltawire.sync.own_loop" in sys.modules
