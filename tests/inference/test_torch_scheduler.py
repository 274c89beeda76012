"""What is computed, and what is not computed twice."""

from collections.abc import Callable

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from deltawire.protocol.generation import GenerateRequest, Sampling
from deltawire_inference.engines.torch.attention import ATTENTION, install_attention
from deltawire_inference.engines.torch.core import EngineCore, Limits
from deltawire_inference.engines.torch.kv import KVShape
from deltawire_inference.engines.torch.row import Row, dice_of
from deltawire_inference.engines.torch.stops import StopRule

HEAD = list(range(40))


@pytest.fixture
def make_core() -> Callable[..., tuple[EngineCore, list[int]]]:
    """A core over a tiny model, and a list that grows by the tokens of each forward pass."""

    def make(**limits: int) -> tuple[EngineCore, list[int]]:
        install_attention()
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            attn_implementation=ATTENTION,
        )
        model = LlamaForCausalLM(config).eval()
        widths: list[int] = []
        model.register_forward_pre_hook(
            lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]),
            with_kwargs=True,
        )
        shape = KVShape(
            layers=1, heads=1, head_dim=8, dtype=torch.float32, device=torch.device("cpu")
        )
        return EngineCore(model, shape, limits=Limits(**limits), version=0), widths

    return make


def rows(prompt: list[int], *, n: int = 1, new: int = 4, session: str = "") -> list[Row]:
    """Rows of one request."""
    sampling = Sampling(max_new_tokens=new, ignore_eos=True, seed=1)
    request = GenerateRequest(prompt_ids=prompt, n=n, sampling=sampling, session=session)
    return [
        Row(
            request=request,
            index=index,
            stops=StopRule(sampling, eos_ids=frozenset(), max_new=new, decoder=None),
            dice=dice_of(request, index),
            token_ids=list(prompt),
        )
        for index in range(n)
    ]


@torch.inference_mode()
def finish(core: EngineCore) -> None:
    """Until nobody runs or waits."""
    while core.has_work:
        core.step()


def test_a_group_computes_its_prompt_once(make_core: Callable) -> None:
    core, widths = make_core()
    core.add(rows(HEAD, n=8))

    finish(core)

    # The first row prefills 40; the others start from its KV and compute only the last token.
    assert widths[:2] == [40, 8]
    assert sum(widths) == 40 + 8 * 4 - 1


def test_prompts_with_a_common_head_compute_it_once(make_core: Callable) -> None:
    core, widths = make_core()
    for i in range(4):
        core.add(rows([*HEAD, 50 + i, 1, 2]))

    finish(core)

    assert widths[:2] == [43, 1 + 3 * 3]


def test_the_next_turn_of_a_session_computes_only_what_is_new(make_core: Callable) -> None:
    core, widths = make_core()
    (first,) = rows(HEAD, session="s")
    core.add([first])
    finish(core)
    widths.clear()

    core.add(rows([*first.token_ids, 7, 7, 7], session="s"))
    finish(core)

    assert widths[0] == 4  # the token that was sampled last has no KV yet, and three new ones


def test_long_prompts_are_cut_to_the_budget_and_others_go_on(make_core: Callable) -> None:
    core, widths = make_core(max_step_tokens=16)
    (short,), (long,) = rows([9], new=12), rows(HEAD)
    core.add([short, long])
    with torch.inference_mode():
        core.step()
        assert len(short.draws) == 1 and not long.draws  # the short one does not wait

    finish(core)

    assert max(widths) <= 16
    assert (len(short.draws), len(long.draws)) == (12, 4)


def test_rows_beyond_the_limit_wait_and_all_finish(make_core: Callable) -> None:
    core, _ = make_core(max_rows=3, prefix_bytes=0)
    made = [row for i in range(10) for row in rows([i, 1, 2], new=1 + i)]
    core.add(made)
    with torch.inference_mode():
        core.step()

    assert len(core.running) <= 3 and len(core.waiting) >= 7
    finish(core)
    assert [len(row.draws) for row in made] == [1 + i for i in range(10)]
    assert not core.running and not core.waiting


def test_what_a_row_draws_does_not_depend_on_rows_that_leave(make_core: Callable) -> None:
    core, _ = make_core()
    (alone,) = rows(HEAD, new=20)
    core.add([alone])
    finish(core)
    core, _ = make_core(max_rows=4)
    others = [row for i in range(6) for row in rows([i, 3], new=2 + i)]
    (beside,) = rows(HEAD, new=20)
    core.add([*others[:3], beside, *others[3:]])
    with torch.inference_mode():
        for _ in range(3):
            core.step()
        core.remove([others[1], others[5]])
    finish(core)

    assert beside.token_ids == alone.token_ids
    assert beside.draws[-1].logprob == pytest.approx(alone.draws[-1].logprob, abs=1e-4)
