"""`deltawire rollouts`: look at what was trained on, from a run folder or a running trainer."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pydantic import ValidationError
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from deltawire.cli.dropped import failed_groups, unnamed_failures
from deltawire.cli.trainer_face import get_json, is_url
from deltawire.protocol.errors import MalformedMessage, MalformedObject, RemoteError, SettingsError
from deltawire.protocol.rollouts import Rollout, RolloutGroup, Sequence

_COLUMNS = ("rollout", "step", "reward", "status", "tokens", "versions")
_MOST_ASKED = 512
"""Rollouts of one answer of a trainer."""
_WIDE = 110
"""Columns of a terminal from which on the parts of the reward are shown."""
_STATUS_STYLE = {"ok": "green", "truncated": "yellow", "error": "red"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A rollout and the step that trained on it."""

    step: int
    rollout: Rollout
    run_id: str = ""


def show_rollouts(source: str, *, show: str, limit: int, status: str, as_json: bool) -> int:
    """Print a table, or one rollout in full. 0 when there was something to show."""
    remote = is_url(source)
    console = Console()
    output: RenderableType
    if show:
        found = _fetched(source, show) if remote else _read(Path(source), show)
        output = whole(found, None if remote else tokenizer_of(Path(source)))
        data: object = {
            **found.rollout.model_dump(mode="json"),
            "reward": reward_of(found.rollout),
        }
    else:
        rows = _rows(source, limit=limit, status=status)
        output, data = overview(rows, width=console.width), rows
    if as_json:
        console.print_json(json.dumps(data))
    else:
        console.print(output)
        if remote and status == "error" and (more := unnamed_failures(source)):
            console.print(Text(more))
    return 0


def _rows(source: str, *, limit: int, status: str) -> list[dict[str, Any]]:
    """Rollouts that were trained on; among errors also the groups that nothing was left of."""
    failed = failed_groups(source) if status == "error" else []
    if is_url(source):
        rows = _summaries(source, _MOST_ASKED if status else limit)
    else:
        rows = _newest(Path(source), limit, status, may_be_none=bool(failed))
    return [*(row for row in rows if not status or row["status"] == status), *failed][:limit]


def overview(rows: list[dict[str, Any]], *, width: int) -> Table:
    """One line a rollout. Reasons where there are any; parts of the reward, and facts beside
    reasons, where `width` columns leave room."""
    reasons = any(row.get("reason") for row in rows)
    wide = width >= _WIDE
    facts = any(row["info"] for row in rows) and (wide or not reasons)
    table = Table(*_COLUMNS, *["reason"] * reasons, *["parts"] * wide, *["facts"] * facts)
    for row in rows:
        cells: list[str | Text] = [
            Text(short_id(row["rollout_id"], row.get("run_id", "")), no_wrap=True),
            _or_dash(row["step"]),
            _reward(row["reward"]),
            Text(row["status"], style=_STATUS_STYLE.get(row["status"], "")),
            _or_dash(row["tokens"]),
            f"{_or_dash(row['oldest_version'])}..{_or_dash(row['newest_version'])}",
        ]
        if reasons:
            cells.append(Text(row.get("reason", "")))
        if wide:
            cells.append(_one_line(_named(row.get("reward_parts", {}), ".3g")))
        if facts:
            cells.append(_one_line(_named(row["info"], "")))
        table.add_row(*cells)
    return table


def short_id(rollout_id: str, run_id: str) -> str:
    """Without the run in front, which all rows share: ``000017/3``."""
    return rollout_id.removeprefix(f"{run_id}-") if run_id else rollout_id


def _reward(reward: float | None) -> str:
    return "-" if reward is None else f"{reward:.3f}"


def _or_dash(number: int | None) -> str:
    return "-" if number is None else str(number)


def _named(values: dict[str, Any], form: str) -> str:
    return "  ".join(f"{name}={value:{form}}" for name, value in values.items())


def _one_line(text: str) -> Text:
    return Text(text, overflow="ellipsis", no_wrap=True)


def reward_of(rollout: Rollout) -> float | None:
    """None of an error: nobody could compute it."""
    return None if rollout.status == "error" else rollout.reward


def whole(seen: Seen, tokenizer: Any | None) -> Text:
    """Everything of one rollout. Sampled tokens are bold, what was only read is dim."""
    rollout = seen.rollout
    text = Text()
    text.append(f"{rollout.rollout_id}  step {seen.step}  reward {_reward(reward_of(rollout))}  ")
    text.append(rollout.status, style=_STATUS_STYLE.get(rollout.status, ""))
    text.append(f"  {rollout.reason}\n" if rollout.reason else "\n")
    parts = {**rollout.reward_parts, **rollout.metrics}
    text.append("  ".join(f"{name}={value:.3g}" for name, value in parts.items()) + "\n")
    times = "  ".join(f"{name} {value:.2f} s" for name, value in rollout.timings_s.items())
    text.append(f"{times}\nreplica {rollout.replica_id}  environment {rollout.environment_id}\n")
    for sequence in rollout.sequences:
        spans = ", ".join(f"v{s.version}: {s.start}..{s.end}" for s in sequence.spans)
        text.append(f"\n-- {sequence.agent}  reward {sequence.reward:.3f}  {spans}\n")
        text.append_text(_tokens(sequence, tokenizer))
    return text


def _tokens(sequence: Sequence, tokenizer: Any | None) -> Text:
    text, start = Text(), 0
    mask = sequence.loss_mask
    for end in range(1, len(mask) + 1):
        if end == len(mask) or mask[end] != mask[start]:
            ids = sequence.token_ids[start:end]
            shown = (
                " ".join(map(str, ids))
                if tokenizer is None
                else tokenizer.decode(ids, skip_special_tokens=False)
            )
            text.append(shown, style="bold cyan" if mask[start] else "dim")
            start = end
    return text.append("\n")


def tokenizer_of(folder: Path) -> Any | None:
    """The tokenizer in the run's own bucket, when it lies in the run folder."""
    from deltawire.rollout.tokenizer import ChatTokenizer

    for found in sorted(folder.glob("bucket/**/model/tokenizer.json")):
        try:
            return ChatTokenizer.from_folder(found.parent)
        except MalformedObject:
            continue
    return None


# -- a run folder ---------------------------------------------------------------------------------


def _newest(
    folder: Path, limit: int, status: str, *, may_be_none: bool = False
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for seen in _recorded(folder, may_be_none=may_be_none):
        if not status or seen.rollout.status == status:
            rows.append(_summary(seen))
        if len(rows) == limit:
            break
    return rows


def _read(folder: Path, rollout_id: str) -> Seen:
    for seen in _recorded(folder):
        if rollout_id in (seen.rollout.rollout_id, short_id(seen.rollout.rollout_id, seen.run_id)):
            return seen
    raise SettingsError(f"no rollout {rollout_id!r} in {folder}; list them without --show")


def _recorded(folder: Path, *, may_be_none: bool = False) -> Iterator[Seen]:
    """All rollouts on disk, newest step first."""
    files = sorted(folder.glob("rollouts/step_*.jsonl"), reverse=True)
    if not files and not may_be_none:
        raise SettingsError(f"{folder} holds no rollouts; name a run folder or a trainer's URL")
    for path in files:
        step = int(path.stem.removeprefix("step_"))
        # Not splitlines(): what a policy says may hold U+2028, which ends no line of JSON.
        for line in path.read_text(encoding="utf-8").removesuffix("\n").split("\n"):
            try:
                group = RolloutGroup.model_validate_json(line)
            except ValidationError as error:
                raise MalformedMessage(f"{path}: not a rollout group: {error}") from error
            for rollout in group.rollouts:
                yield Seen(step=step, rollout=rollout, run_id=group.run_id)


def _summary(seen: Seen) -> dict[str, Any]:
    rollout = seen.rollout
    return {
        "rollout_id": rollout.rollout_id,
        "run_id": seen.run_id,
        "step": seen.step,
        "reward": reward_of(rollout),
        "reward_parts": rollout.reward_parts,
        "status": rollout.status,
        "reason": rollout.reason,
        "tokens": sum(sum(sequence.loss_mask) for sequence in rollout.sequences),
        "oldest_version": rollout.oldest_version,
        "newest_version": rollout.newest_version,
        "info": rollout.info,
    }


# -- a trainer ------------------------------------------------------------------------------------


def _summaries(url: str, limit: int) -> list[dict[str, Any]]:
    answer: list[dict[str, Any]] = get_json(url, f"/rollouts?limit={min(limit, _MOST_ASKED)}")
    return answer


def _fetched(url: str, rollout_id: str) -> Seen:
    answer = get_json(url, f"/rollouts/{quote(rollout_id)}")
    try:
        rollout = Rollout.model_validate(answer["rollout"])
        return Seen(step=int(answer["summary"]["step"]), rollout=rollout)
    except (KeyError, TypeError, ValueError) as error:
        raise RemoteError(url, status=200, detail=f"not a rollout: {error}") from error
