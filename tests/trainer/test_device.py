"""Where the model is trained."""

import copy
from pathlib import Path

import pytest
import torch

from deltawire.job.spec import TrainSpec
from deltawire.protocol.errors import SettingsError
from deltawire_trainer.learner import Learner
from deltawire_trainer.opening import usable_device
from deltawire_trainer.optimizer import build_optimizer
from deltawire_trainer.policy import Policy

from .conftest import MakeSample


@pytest.mark.parametrize("name", ["nonsense", "cuda:99"])
def test_a_device_that_is_not_there_is_one_sentence(name: str) -> None:
    with pytest.raises(SettingsError, match=f"TRAINER_DEVICE={name}: "):
        usable_device(name)


def test_a_device_that_is_there_is_used(base: Path) -> None:
    policy = Policy.load(
        base,
        working_dtype=torch.bfloat16,
        temperature=1.0,
        gradient_checkpointing=False,
        device=usable_device("cpu"),
    )

    assert policy.device == torch.device("cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_step_on_a_gpu_equals_one_on_the_cpu(policy: Policy, make_sample: MakeSample) -> None:
    spec = TrainSpec(autocast=False, lr=1e-3)
    there = Policy(copy.deepcopy(policy.model).to("cuda"))
    samples = [
        make_sample([1, 2, 3, 4, 5], [2, 3, 4], name="a", sampling_mask=[[3, 9], [4], [5, 7]]),
        make_sample([1, 2, 8, 9], [2, 3], name="b", advantage=-1.0, sampling_mask=[[8], [9, 4]]),
    ]

    for where in (policy, there):
        learner = Learner(where, build_optimizer(where, spec), spec, max_tokens=4)
        learner.apply(learner.accumulate(samples, live_version=0), step=0)

    for name, master in policy.masters.items():
        torch.testing.assert_close(there.masters[name].cpu(), master, rtol=1e-3, atol=1e-4)
