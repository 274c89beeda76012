"""What anyone's training loop holds: `step()` after `optimizer.step()`, or `attach(optimizer)`."""

import logging
from abc import ABC, abstractmethod
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

import torch
from torch.utils.hooks import RemovableHandle

from deltawire.protocol.errors import Fenced, StoreError
from deltawire.protocol.versions import PolicyVersion
from deltawire.sync.model_weights import named_weights
from deltawire.sync.publisher import PendingDelta, Published, Publisher

log = logging.getLogger(__name__)


class LoopPublisher(ABC):
    """Publishes a live model. Used as a context manager it finishes the run at a clean exit."""

    def __init__(self) -> None:
        self._hooks: list[RemovableHandle] = []

    @abstractmethod
    def step(self) -> None:
        """Publish what the model is now. Returns after the diff; the rest goes on beside training.

        Raises Fenced when another trainer took the run over: stop. A version that did not reach
        the bucket is logged; the next one contains its changes.
        """

    @abstractmethod
    def wait(self) -> PolicyVersion:
        """Return the newest committed version, once nothing is on its way."""

    @abstractmethod
    def finish(self) -> None:
        """Write a last anchor and mark the run finished."""

    def close(self) -> None:
        """Let go of the optimizer, of threads and of files."""
        self.detach()

    def attach(self, optimizer: torch.optim.Optimizer, *, every: int = 1) -> None:
        """Call `step()` after every `every`-th step of the optimizer, wrapped by Accelerate or not.

        Call it once; steps that gradient accumulation or a grad scaler skips are not counted.
        """
        inner = optimizer
        while isinstance(wrapped := getattr(inner, "optimizer", None), torch.optim.Optimizer):
            inner = wrapped
        made = 0

        def stepped(*_: object) -> None:
            nonlocal made
            made += 1
            if made % every == 0:
                self.step()

        self._hooks.append(inner.register_step_post_hook(stepped))

    def detach(self) -> None:
        """Let the optimizers step alone again; `close` does it too."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self.close()


class Commits:
    """Versions on their way in a thread of their own, one at a time."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="deltawire-commit")
        self._newest: Future[Published] | None = None

    def start(self, pending: PendingDelta) -> None:
        """Send a version on its way."""
        self._newest = self._thread.submit(self._publisher.commit, pending)

    def settled(self) -> None:
        """Return when nothing is on its way. Raises Fenced; logs a version that failed."""
        newest, self._newest = self._newest, None
        if newest is None:
            return
        try:
            newest.result()
        except Fenced:
            raise
        except StoreError as error:
            log.warning("version not published", extra={"reason": str(error)})

    def close(self) -> None:
        """Wait for what is on its way."""
        self._thread.shutdown(wait=True)


class ModelPublisher(LoopPublisher):
    """A model whose weights this process holds."""

    def __init__(self, model: torch.nn.Module, publisher: Publisher) -> None:
        super().__init__()
        self._model = model
        self.publisher = publisher
        self._commits = Commits(publisher)

    def step(self) -> None:
        """See LoopPublisher."""
        self._commits.settled()
        self._commits.start(self.publisher.diff(named_weights(self._model)))

    def wait(self) -> PolicyVersion:
        """See LoopPublisher."""
        self._commits.settled()
        self.publisher.settled()
        return self.publisher.version

    def finish(self) -> None:
        """See LoopPublisher."""
        self.wait()
        self.publisher.finish()

    def close(self) -> None:
        """See LoopPublisher."""
        super().close()
        self._commits.close()
        self.publisher.close()


class SilentRank(LoopPublisher):
    """A rank whose weights are copies: rank 0 publishes, this one has nothing to do."""

    def step(self) -> None:
        """Nothing."""

    def wait(self) -> PolicyVersion:
        """This rank knows of no version."""
        return PolicyVersion(0)

    def finish(self) -> None:
        """Nothing."""
