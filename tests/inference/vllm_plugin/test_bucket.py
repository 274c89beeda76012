"""Updates straight from the bucket, in one worker and without vLLM around it."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch

from deltawire.protocol.errors import ObjectMissing
from deltawire.protocol.layout import in_run
from deltawire.store.local import LocalStore
from deltawire.sync.follower import Follower
from deltawire.sync.publisher import Publisher
from deltawire_inference.vllm_plugin.bucket import Bucket
from deltawire_inference.vllm_plugin.checkpoint_map import TensorSpec
from deltawire_inference.vllm_plugin.receiver import Receiver
from deltawire_inference.vllm_plugin.trace import learn_map


class Model(torch.nn.Module):
    """One weight that lies whole on this rank."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(weight.clone(), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, loaded in weights:
            self.w.data.copy_(loaded)


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[Publisher]:
    weight = torch.zeros(64, 64, dtype=torch.bfloat16)
    made = Publisher.open(
        LocalStore(tmp_path / "bucket"), run_id="run", named_tensors=[("w", weight)]
    )
    yield made
    made.close()


def test_what_could_not_be_staged_does_not_stand_in_the_way_of_another_version(
    publisher: Publisher, tmp_path: Path
) -> None:
    weight = torch.zeros(64, 64, dtype=torch.bfloat16)
    model = Model(weight)
    receiver = Receiver(model)
    spec = TensorSpec(name="w", shape=(64, 64), dtype=torch.bfloat16)
    receiver.adopt(learn_map(model, [spec]))
    store = LocalStore(tmp_path / "bucket")
    bucket = Bucket(receiver, Follower(store, "run", tmp_path / "cache"))
    weight[3, 5] = 2.0
    published = publisher.publish([("w", weight)])
    missing = in_run("run", "deltas/step_000009.safetensors")

    bucket.start_stage(store.uri, missing)
    bucket.apply(store.uri, in_run("run", published.link.key))

    assert torch.equal(model.w, weight)
    with pytest.raises(ObjectMissing):
        bucket.apply(store.uri, missing)
