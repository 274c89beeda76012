"""TRL, and any other trainer of transformers, publishes its weights: one callback.

    with PublishWeights("hf://buckets/me/weights", run_id="first") as publishing:
        trainer = GRPOTrainer(..., callbacks=[publishing])
        trainer.train()

Whatever samples or evaluates elsewhere follows the run with `deltawire.follow`, or is a replica of
the inference service. TRL's own sampling stays as it is.
"""

from pathlib import Path
from typing import Self

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from deltawire.store.base import Store
from deltawire.sync.loop_publisher import LoopPublisher
from deltawire.sync.own_loop import publish

_OWNER = "deltawire-owner"
"""Beside the trainer's checkpoints: by it a restarted trainer goes on with its run."""


class PublishWeights(TrainerCallback):  # type: ignore[misc]
    """Publishes version 0 when training begins, one version every `every` optimizer steps, and an
    anchor at the end. Training waits for the diff only.

    `run_id` should be new for every training, or the same for one that is resumed from its output
    folder; `take_over` goes on with the run of a trainer whose folder is lost. Raises Fenced out of
    `train()` when another trainer took the run over. As a context manager it lets go of the run
    also when training fails.
    """

    def __init__(
        self, store: str | Store, *, run_id: str = "", every: int = 1, take_over: bool = False
    ) -> None:
        self._store, self._run_id, self._every = store, run_id, every
        self._take_over = take_over
        self._publisher: LoopPublisher | None = None
        self._published_step = 0

    @property
    def publisher(self) -> LoopPublisher:
        """The publisher of the training under way. Raises RuntimeError before it began."""
        if self._publisher is None:
            raise RuntimeError("nothing is published before train() began")
        return self._publisher

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: torch.nn.Module,
        processing_class: object = None,
        **_: object,
    ) -> None:
        """Found the run, or go on with it."""
        self._publisher = publish(
            model,
            store=self._store,
            run_id=self._run_id,
            tokenizer=processing_class,
            owner_file=Path(args.output_dir) / _OWNER,
            take_over=self._take_over,
        )
        self._published_step = state.global_step

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """After an optimizer step: publish when it is due."""
        if state.global_step - self._published_step >= self._every:
            self.publisher.step()
            self._published_step = state.global_step

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Publish what is not yet published, and finish the run."""
        if state.global_step > self._published_step:
            self.publisher.step()
        self.publisher.finish()
        self.close()

    def close(self) -> None:
        """Let go of the run; a training that starts later opens it again."""
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            publisher.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
