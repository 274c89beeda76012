"""Who may publish: a pure rule, and a file that only one process holds."""

import subprocess
import sys
from pathlib import Path

import pytest

from deltawire.protocol.chain import Head
from deltawire.protocol.errors import Fenced
from deltawire.sync.fence import Claim, OwnerFile, check_claim, claim_run, new_owner


def _head(owner: str, epoch: int, state: str = "running") -> Head:
    return Head.model_validate(
        {"run_id": "r", "owner": owner, "epoch": epoch, "state": state, "updated_at": 100.0}
    )


def test_a_new_run_is_claimed_at_epoch_one() -> None:
    assert claim_run(None, owner="me", take_over=False, now_s=0) == Claim(owner="me", epoch=1)


def test_an_own_run_is_claimed_at_the_next_epoch() -> None:
    assert claim_run(_head("me", 4), owner="me", take_over=False, now_s=0).epoch == 5
    assert claim_run(_head("me", 4, "finished"), owner="me", take_over=False, now_s=0).epoch == 5


def test_anothers_run_is_refused_and_says_for_how_long_it_was_silent() -> None:
    with pytest.raises(Fenced, match=r"epoch 4, last written 30 s ago"):
        claim_run(_head("other", 4), owner="me", take_over=False, now_s=130.0)
    with pytest.raises(Fenced, match="is finished"):
        claim_run(_head("other", 4, "finished"), owner="me", take_over=False, now_s=130.0)


def test_a_take_over_raises_the_epoch() -> None:
    claim = claim_run(_head("other", 4), owner="me", take_over=True, now_s=0)
    assert claim == Claim(owner="me", epoch=5)


@pytest.mark.parametrize(("owner", "epoch"), [("other", 4), ("me", 5), ("me", 3)])
def test_a_head_of_another_claim_fences(owner: str, epoch: int) -> None:
    with pytest.raises(Fenced, match="must stop"):
        check_claim(_head(owner, epoch), Claim(owner="me", epoch=4))
    check_claim(_head("me", 4), Claim(owner="me", epoch=4))


def test_the_owner_file_remembers(tmp_path: Path) -> None:
    with OwnerFile(tmp_path / "run" / "owner") as first:
        owner = first.owner
    with OwnerFile(tmp_path / "run" / "owner") as again:
        assert again.owner == owner
    assert new_owner() != new_owner()


def test_the_owner_file_is_held_by_one_process(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from deltawire.sync.fence import OwnerFile;"
        "OwnerFile(Path(sys.argv[1]))"
    )
    with OwnerFile(tmp_path / "owner"):
        second = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "owner")],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    assert second.returncode != 0
    assert "held by a trainer process that still runs" in second.stderr
