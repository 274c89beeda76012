"""What somebody probably meant: the nearest known name for an unknown one."""

import difflib
from collections.abc import Iterable

_OTHER_WORDS = {
    "learning_rate": "lr",
    "num_generations": "group_size",
    "n": "group_size",
    "batch_size": "groups_per_step",
    "per_device_train_batch_size": "groups_per_step",
    "max_steps": "steps",
    "num_train_epochs": "steps",
    "loss_type": "algorithm",
    "beta": "kl_coef",
    "epsilon": "clip_low",
    "epsilon_high": "clip_high",
    "max_completion_length": "max_new_tokens",
    "max_tokens_per_turn": "max_new_tokens",
    "model_name": "source",
    "model_name_or_path": "source",
    "peft_config": "lora",
    "r": "rank",
    "lora_alpha": "alpha",
    "lora_rank": "rank",
    "target_modules": "targets",
    "use_rslora": "rank_stabilised",
    "lr_scheduler_type": "schedule",
    "anchor_cadence": "anchor_every",
    "environment": "env",
    "reward_funcs": "rewards",
    "reward": "rewards",
    "args": "train",
    "dataset": "env",
}
"""What other training libraries call it -> our word."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name closest in spelling or in meaning, or None.

    Dotted names compare by their last part too: `train.learning_rate` finds `train.lr`, and
    `lr` finds `train.lr`.
    """
    names = list(known)
    folder, _, leaf = name.rpartition(".")
    leaf = _OTHER_WORDS.get(leaf, leaf)
    same_leaf = [candidate for candidate in names if candidate.rpartition(".")[2] == leaf]
    if same_leaf:
        return next((c for c in same_leaf if c.startswith(folder)), same_leaf[0])
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return close[0]
    by_leaf = {candidate.rpartition(".")[2]: candidate for candidate in names}
    close = difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.6)
    return by_leaf[close[0]] if close else None


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """One sentence: what is not known, and what was probably meant."""
    names = sorted(known)
    guess = nearest(name, names)
    if guess is not None:
        return f"{kind} {name!r} is not known; did you mean {guess!r}?"
    return f"{kind} {name!r} is not known; choose one of: {', '.join(names)}"
