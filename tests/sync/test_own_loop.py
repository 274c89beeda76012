"""publish and follow in a training loop of one's own: plain, tied, compiled names, Accelerate."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import deltawire
from deltawire.codec.bits import bits_of
from deltawire.protocol.errors import Fenced, LayoutMismatch, ObjectMissing, WeightsError
from deltawire.sync.model_weights import named_weights


class Tied(torch.nn.Module):
    """Embedding and head share their weight; a persistent buffer goes along."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(50, 16, dtype=dtype)
        self.mix = torch.nn.Linear(16, 16, dtype=dtype)
        self.head = torch.nn.Linear(16, 50, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(3, dtype=dtype))
        self.register_buffer("cache", torch.zeros(7), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.mix(self.embed(ids)))
        return out


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, steps: int = 1) -> None:
    for _ in range(steps):
        ids = torch.randint(0, 50, (8, 5))
        loss = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def bits(model: torch.nn.Module) -> dict[str, bytes]:
    """What a bf16 replica must hold."""
    return {
        name: bits_of(tensor.to(torch.bfloat16)).tobytes() for name, tensor in named_weights(model)
    }


@pytest.fixture
def bucket(tmp_path: Path) -> str:
    return f"file://{tmp_path}/bucket"


@pytest.fixture
def follower(bucket: str) -> Iterator[Any]:
    opened = deltawire.follow(bucket)
    yield opened
    opened.close()


def test_a_model_published_step_by_step_arrives_bit_exact(bucket: str, follower: Any) -> None:
    model, replica = Tied(), Tied(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with deltawire.publish(model, store=bucket) as publisher:
        assert follower.apply_to(replica) == 0
        for version in range(1, 4):
            train(model, optimizer)
            publisher.step()
            assert publisher.wait() == version
            assert follower.apply_to(replica) == version
            assert bits(replica) == bits(model)

    assert follower.follower.head().state == "finished"
    assert replica.head.weight is replica.embed.weight
    assert follower.follower.manifest().tied == {"head.weight": "embed.weight"}


def test_an_attached_publisher_steps_with_the_optimizer(bucket: str, follower: Any) -> None:
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with deltawire.publish(model, store=bucket) as publisher:
        publisher.attach(optimizer, every=2)
        train(model, optimizer, steps=5)
        assert publisher.wait() == 2

    replica = Tied(torch.bfloat16)
    assert follower.apply_to(replica) == 2


def test_a_closed_publisher_leaves_the_optimizer_alone(bucket: str) -> None:
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with deltawire.publish(model, store=bucket) as publisher:
        publisher.attach(optimizer)
    train(model, optimizer)


def test_accelerate_wraps_model_and_optimizer_and_nothing_changes(
    bucket: str, follower: Any
) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    with deltawire.publish(model, store=bucket) as publisher:
        publisher.attach(optimizer)
        for _ in range(4):
            with accelerator.accumulate(model):
                ids = torch.randint(0, 50, (8, 5))
                loss = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        assert publisher.wait() == 2

    replica = Tied(torch.bfloat16)
    assert follower.apply_to(replica) == 2
    assert bits(replica) == bits(accelerator.unwrap_model(model))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda model: _Compiled(model),
        lambda model: torch.nn.Sequential(_Checkpointed(model)),
    ],
)
def test_names_are_those_of_the_checkpoint_in_any_wrapping(
    wrap: Callable[[torch.nn.Module], torch.nn.Module],
) -> None:
    plain = [name for name, _ in named_weights(Tied())]
    wrapped = [name.removeprefix("0.") for name, _ in named_weights(wrap(Tied()))]

    assert wrapped == plain
    assert "cache" not in plain
    assert {"embed.weight", "head.weight", "scale"} <= set(plain)


class _Compiled(torch.nn.Module):
    """Names as torch.compile makes them."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._orig_mod = model


class _Checkpointed(torch.nn.Module):
    """Names as activation checkpointing makes them."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._checkpoint_wrapped_module = model


def test_a_restarted_loop_goes_on_with_its_owner_file(
    bucket: str, follower: Any, tmp_path: Path
) -> None:
    model, owner = Tied(), tmp_path / "owner"
    for expected in (1, 2):
        publisher = deltawire.publish(model, store=bucket, owner_file=owner)
        with torch.no_grad():
            model.mix.weight += 0.01
        publisher.step()
        assert publisher.wait() == expected
        publisher.close()

    with pytest.raises(Fenced):
        deltawire.publish(model, store=bucket)
    replica = Tied(torch.bfloat16)
    assert follower.apply_to(replica) == 2


def test_a_fenced_loop_is_told_at_its_next_step(bucket: str) -> None:
    first = deltawire.publish(Tied(), store=bucket)
    second = deltawire.publish(Tied(), store=bucket, take_over=True)
    first.step()
    with pytest.raises(Fenced, match="taken over"):
        first.step()

    first.close()
    second.close()


def test_a_replica_that_holds_the_base_downloads_deltas_only(bucket: str, follower: Any) -> None:
    model = Tied()
    replica = Tied(torch.bfloat16)
    replica.load_state_dict(model.state_dict())
    publisher = deltawire.publish(model, store=bucket, anchor_every=100)
    with torch.no_grad():
        model.mix.weight[0, 0] += 1
    publisher.step()
    publisher.wait()

    assert follower.apply_to(replica) == 1
    cached = list((follower.follower._cache / "objects").iterdir())
    assert [path.stem for path in cached] == [publisher.publisher.head.links[1].sha256]
    assert bits(replica) == bits(model)
    publisher.close()


def test_a_replica_somebody_wrote_into_is_refused_and_then_based_anew(
    bucket: str, follower: Any
) -> None:
    model, replica = Tied(), Tied(torch.bfloat16)
    publisher = deltawire.publish(model, store=bucket)
    follower.apply_to(replica)
    with torch.no_grad():
        model.mix.weight += 1
        replica.mix.weight += 3
    publisher.step()
    publisher.wait()
    with pytest.raises(WeightsError):
        follower.apply_to(replica)

    assert follower.apply_to(replica) == 1
    assert bits(replica) == bits(model)
    publisher.close()


def test_a_replica_of_another_dtype_is_told_what_to_do(bucket: str, follower: Any) -> None:
    deltawire.publish(Tied(), store=bucket).close()

    with pytest.raises(LayoutMismatch, match="load the model in the run's dtype"):
        follower.apply_to(Tied())


def test_an_empty_bucket_has_nothing_to_apply(follower: Any) -> None:
    with pytest.raises(ObjectMissing):
        follower.apply_to(Tied(torch.bfloat16))


def test_a_transformers_model_takes_its_configuration_along(bucket: str, follower: Any) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=50,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config)
    with deltawire.publish(model, store=bucket):
        pass

    folder = follower.follower.model_dir()
    again = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(folder), dtype=torch.bfloat16
    )
    assert follower.apply_to(again) == 0
    assert bits(again) == bits(model)
    assert follower.follower.manifest().tied == {"lm_head.weight": "model.embed_tokens.weight"}
