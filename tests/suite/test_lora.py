"""An adapter run in real processes, from `train.lora.rank=4` to a folder that `peft` opens."""

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from deltawire.cli.deltas import app

from .conftest import StartRun
from .test_loop import SMALL

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(600),
    # peft asks for a name that transformers has since given another.
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
]


def _deltas(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.output


@torch.no_grad()
def test_a_lora_run_ends_equal_everywhere_and_peft_opens_what_it_leaves(
    start_run: StartRun, tiny_model: Path, tmp_path: Path
) -> None:
    run = start_run(*SMALL, "train.steps=3", "train.lora.rank=4", "train.lr=1e-2")
    assert run.wait(400) == 0, run.logs()

    summary = run.summary()
    assert [step["version"] for step in summary["steps"]] == [1, 2, 3]
    (replica,) = summary["replicas"]
    assert (replica["version"], replica["digest"]) == (3, summary["digest"])
    assert summary["groups"]["lost"] == 0
    assert all(step["delta_bytes"] < step["full_bytes"] / 2 for step in summary["steps"])

    store = f"file://{run.folder}/bucket"
    assert "sound" in _deltas("verify", store)
    assert "adapter" in _deltas("ls", store)
    assert "adapter:" in _deltas("inspect", store)
    _deltas("export", store, "--out", str(tmp_path / "adapter"))
    _deltas("export", store, "--merge", "--out", str(tmp_path / "merged"))
    ids = torch.tensor([[5, 6, 7, 8]])

    def model(source: Path) -> torch.nn.Module:
        return AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)

    adapted = PeftModel.from_pretrained(model(tiny_model), tmp_path / "adapter")(ids).logits
    merged = model(tmp_path / "merged")(ids).logits
    torch.testing.assert_close(adapted, merged, atol=0.02, rtol=0.02)
    assert not torch.allclose(adapted, model(tiny_model)(ids).logits, atol=1e-3)
