"""Training an adapter: what has masters, what is published, and that `peft` agrees."""

import copy
import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from deltawire.job.spec import LoraSpec, TrainSpec
from deltawire.protocol.adapters import adapter_part
from deltawire.protocol.errors import SettingsError
from deltawire.protocol.layout import ObjectKind
from deltawire.store.open import open_store
from deltawire.streams.memory import MemoryStreams
from deltawire.sync.audit import audit
from deltawire.sync.export import export_adapter, export_checkpoint
from deltawire.sync.follower import Follower
from deltawire_trainer.batches import Budget, pack
from deltawire_trainer.learner import Learner
from deltawire_trainer.memory import training_memory
from deltawire_trainer.optimizer import build_optimizer
from deltawire_trainer.policy import Policy

from .conftest import MakeSample, OpenStreams, tiny_llama
from .rig import RUN, make_job, make_settings, playing, train_to_the_end
from .test_resume import assert_same_bits, killed_after, masters, script, straight

LORA = {"rank": 4, "targets": ["q_proj", "v_proj", "down_proj"]}
# peft asks transformers for a property under its old name.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


def adapted(**options: object) -> Policy:
    """A policy whose adapter does something: B is not zero."""
    policy = Policy(tiny_llama(), lora=LoraSpec.model_validate(LORA), **options)  # type: ignore[arg-type]
    torch.manual_seed(3)
    with torch.no_grad():
        for master in policy.masters.values():
            master.copy_(torch.randn(master.shape) * 0.2)
    policy.refresh()
    return policy


def logprobs(policy: Policy, make_sample: MakeSample) -> torch.Tensor:
    (batch,) = pack([make_sample([5, 6, 7, 8, 9], [3, 4])], Budget(tokens=64, share_prefixes=True))
    return policy.logprobs(batch).tokens


def test_only_the_adapter_is_trained_and_the_base_stays_as_it_was(make_sample: MakeSample) -> None:
    policy = adapted(working_dtype=torch.bfloat16)
    before = {name: weight.clone() for name, weight in policy.frozen.items()}
    spec = TrainSpec(lr=1e-2)
    optimizer = build_optimizer(policy, spec)
    learner = Learner(policy, optimizer, spec, max_tokens=8)
    moving = {name: master.detach().clone() for name, master in policy.masters.items()}

    sample = make_sample([5, 6, 7, 8, 9], [3, 4])
    assert learner.apply(learner.accumulate([sample], live_version=0), step=0).applied

    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(master) for master in policy.masters.values()}
    assert all(adapter_part(name) for name in policy.masters)
    assert all(not torch.equal(policy.masters[n], was) for n, was in moving.items())
    assert all(torch.equal(policy.frozen[n], was) for n, was in before.items())
    assert all(torch.equal(w, policy.masters[n].bfloat16()) for n, w in policy.working.items())


def test_version_0_is_the_base_model(make_sample: MakeSample) -> None:
    fresh = Policy(tiny_llama(), lora=LoraSpec(rank=4))
    torch.testing.assert_close(
        logprobs(fresh, make_sample), logprobs(Policy(tiny_llama()), make_sample), rtol=0, atol=0
    )


def test_one_seed_draws_one_adapter_and_leaves_the_callers_dice_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(5)
        policy = Policy(copy.deepcopy(tiny_llama()), lora=LoraSpec(rank=4), seed=seed)
        drawn.append(torch.cat([master.detach().flatten() for master in policy.masters.values()]))
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_the_reference_is_the_base_and_gradients_pass_it_by(make_sample: MakeSample) -> None:
    policy = adapted()
    plain = logprobs(Policy(tiny_llama()), make_sample)
    (batch,) = pack([make_sample([5, 6, 7, 8, 9], [3, 4])], Budget(tokens=64, share_prefixes=True))

    def gradient(*, with_reference: bool) -> list[torch.Tensor]:
        found = policy.logprobs(batch).tokens
        if with_reference:
            reference = policy.base().logprobs(batch).tokens.detach()
            torch.testing.assert_close(reference, plain)
        parameters = list(policy.masters.values())
        return list(torch.autograd.grad(found.sum(), parameters))

    for one, other in zip(
        gradient(with_reference=False), gradient(with_reference=True), strict=True
    ):
        assert torch.equal(one, other)
    assert not torch.allclose(logprobs(policy, make_sample), plain)


def test_a_kl_penalty_needs_no_second_model(make_sample: MakeSample) -> None:
    policy, spec = adapted(), TrainSpec(kl_coef=0.1)
    learner = Learner(
        policy, build_optimizer(policy, spec), spec, max_tokens=8, reference=policy.base()
    )
    gradient = learner.accumulate([make_sample([5, 6, 7, 8], [3])], live_version=0)
    assert gradient.metrics["reference_kl"] > 0


def test_memory_counts_the_adapter_and_one_copy_of_the_base() -> None:
    full = training_memory(Policy(tiny_llama(), working_dtype=torch.bfloat16))
    low = training_memory(adapted(working_dtype=torch.bfloat16))
    assert full.bytes == full.full_bytes == low.full_bytes
    assert low.trainable == sum(m.numel() for m in adapted().masters.values())
    assert low.parameters == full.parameters + low.trainable
    assert low.bytes == 2 * full.parameters + 20 * low.trainable


@pytest.mark.parametrize("targets", [["embed_tokens"], ["no_such_layer"]])
def test_layers_that_cannot_be_adapted_are_refused(targets: list[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's own about tied embeddings
        with pytest.raises(SettingsError, match=r"train\.lora\.targets"):
            Policy(tiny_llama(), lora=LoraSpec(targets=targets))


async def test_a_run_publishes_adapters_that_peft_opens_with_the_trainers_logits(
    tmp_path: Path, base: Path
) -> None:
    settings, streams = make_settings(tmp_path), MemoryStreams()
    async with playing(script(settings, streams, tmp_path / "replica")):
        status = await train_to_the_end(settings, make_job(base, lora=LORA, lr=2e-2), streams)

    assert status.state == "finished", status.reason
    assert (status.step, status.version) == (6, 6)
    (replica,) = status.replicas
    assert (replica.version, replica.digest) == (6, status.digest)
    assert status.memory is not None
    assert status.memory.bytes < status.memory.full_bytes / 2
    syncs = [record.sync for record in status.history]
    assert all(sync is not None and sync.bytes < sync.full_bytes for sync in syncs)

    follower = Follower(open_store(settings.store), RUN, tmp_path / "reader")
    assert all(not verdict.problem for verdict in audit(follower))
    links = follower.head().links
    assert [link.version for link in links if link.kind is ObjectKind.ANCHOR] == [0]
    assert export_adapter(follower, 6, tmp_path / "adapter") == export_checkpoint(
        follower, 6, tmp_path / "merged"
    )
    logits_agree(base, tmp_path, masters(settings.run_dir))


@torch.no_grad()
def logits_agree(base: Path, folder: Path, trained: dict[str, torch.Tensor]) -> None:
    """The trainer's own adapter, `peft` on the exported one, and the merged checkpoint."""

    def model(source: Path) -> torch.nn.Module:
        return AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)

    ids = torch.tensor([[5, 6, 7, 8]])
    opened = PeftModel.from_pretrained(model(base), folder / "adapter")
    ours = Policy(model(base), lora=LoraSpec.model_validate(LORA))  # type: ignore[arg-type]
    for name, master in ours.masters.items():
        master.copy_(trained[name].bfloat16())
    expected = ours.model(ids).logits
    torch.testing.assert_close(opened(ids).logits, expected, rtol=0, atol=0)
    torch.testing.assert_close(model(folder / "merged")(ids).logits, expected, rtol=0.1, atol=0.05)
    assert not torch.allclose(model(base)(ids).logits, expected, atol=1e-3)
    saved = load_file(folder / "adapter" / "adapter_model.safetensors")
    assert saved.keys() == ours.masters.keys()
    config = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["target_modules"]) == (4, sorted(LORA["targets"]))  # type: ignore[call-overload]


async def test_a_killed_adapter_run_ends_in_the_same_bits(
    tmp_path: Path, base: Path, open_redis: OpenStreams
) -> None:
    whole = await straight(tmp_path / "a", base, 4, lora=LORA)

    folder = tmp_path / "b"
    await killed_after(folder, base, open_redis, steps=2, checkpoint_every=100, lora=LORA)
    settings, job = make_settings(folder), make_job(base, steps=4, lora=LORA)
    async with playing(script(settings, open_redis(), folder / "replica2")):
        resumed = await train_to_the_end(settings, job, open_redis())

    assert resumed.state == "finished", resumed.reason
    assert resumed.digest == whole.digest
    assert_same_bits(masters(folder / "run"), masters(tmp_path / "a" / "run"))
    assert [record.version for record in resumed.history] == [1, 2, 3, 4]
    assert (resumed.groups.lost, resumed.groups.doubled) == (0, 0)


async def test_an_adapter_run_is_taken_over_from_the_bucket(
    tmp_path: Path, base: Path, open_redis: OpenStreams
) -> None:
    await killed_after(tmp_path, base, open_redis, steps=2, checkpoint_every=100, lora=LORA)
    shutil.rmtree(tmp_path / "run")
    settings = make_settings(tmp_path, take_over=True)
    async with playing(script(settings, open_redis(), tmp_path / "replica2")):
        job = make_job(base, steps=4, lora=LORA, seed=9)
        resumed = await train_to_the_end(settings, job, open_redis())

    assert resumed.state == "finished", resumed.reason
    assert (resumed.step, resumed.version) == (4, 4)
    assert any(replica.digest == resumed.digest for replica in resumed.replicas)
    follower = Follower(open_store(settings.store), RUN, tmp_path / "reader")
    assert all(not verdict.problem for verdict in audit(follower))
