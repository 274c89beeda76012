"""Will a model's chat template take this conversation, and can it be continued token by token?

Needs the model's tokenizer files on this machine; downloads nothing.
"""

import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path

from deltawire.job.transcript import Message
from deltawire.protocol.errors import MalformedMessage, MalformedObject


def find_chat_template(source: str) -> str | None:
    """The template in a model folder, our cache or the Hub's; None when it is not here."""
    for folder in model_folders(source):
        plain = folder / "chat_template.jinja"
        if plain.is_file():
            return plain.read_text(encoding="utf-8")
        config = folder / "tokenizer_config.json"
        if config.is_file():
            template = json.loads(config.read_text(encoding="utf-8")).get("chat_template")
            if isinstance(template, str):
                return template
    return None


def model_folders(source: str) -> list[Path]:
    """Where the model's files are on this machine; nowhere when it must be fetched."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    snapshots = home / "hub" / f"models--{source.replace('/', '--')}" / "snapshots"
    cached = sorted(snapshots.iterdir()) if snapshots.is_dir() else []
    ours = Path(os.environ.get("DELTAWIRE_CACHE", "~/.cache/deltawire")).expanduser()
    unpacked = ours / f"{source.rpartition('/')[2].lower()}-bf16"
    return [f for f in (Path(source).expanduser(), unpacked, *cached) if f.is_dir()]


def is_folder_name(source: str) -> bool:
    """Whether a model's source can only be meant as a folder: no Hub id looks like it."""
    return source.startswith(("/", "./", "../", "~")) or source.count("/") > 1


def template_problem(template: str, messages: Sequence[Message]) -> str:
    """Why the template cannot carry the conversation, or "".

    Every earlier state must be a prefix of the whole, or what was sampled would have to be
    tokenised again.
    """
    from deltawire.rollout.template import ChatTemplate

    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "", "unk_token": ""}
    try:
        compiled = ChatTemplate(template, special=special)
        shown = [
            compiled.render(messages[:upto])
            for upto in range(1, len(messages) + 1)
            if messages[upto - 1]["role"] in ("user", "tool", "assistant")
        ]
    except (MalformedMessage, MalformedObject) as error:
        return str(error)
    for earlier, later in itertools.pairwise(shown):
        if not later.startswith(earlier.rstrip()):
            return "the model's chat template rewrites earlier turns when a later one is added"
    return ""


def role_problem(messages: Sequence[Message]) -> str:
    """What most templates refuse, or "": a system message that is not first, two alike in a row."""
    roles = [message["role"] for message in messages]
    known = {"system", "user", "assistant", "tool"}
    if strange := [role for role in roles if role not in known]:
        return f"role {strange[0]!r} is none of {', '.join(sorted(known))}"
    if "system" in roles[1:]:
        return "a system message stands after the first place"
    for before, after in itertools.pairwise(roles):
        if before == after and before != "tool":
            return f"two {before} messages follow each other"
    return ""
