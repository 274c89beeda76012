"""The learned map on a model whose loaders are as odd as any, without vLLM."""

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltawire.protocol.errors import MalformedObject, ReplicaBroken
from deltawire_inference.vllm_plugin.checkpoint_map import (
    CheckpointMap,
    TensorSpec,
    UnmappableName,
)
from deltawire_inference.vllm_plugin.live import (
    LiveModel,
    bits,
    count_differences,
    differing,
    read_tensor,
    write_tensor,
)
from deltawire_inference.vllm_plugin.pieces import TablePiece
from deltawire_inference.vllm_plugin.receiver import Receiver
from deltawire_inference.vllm_plugin.staged import plan_patch
from deltawire_inference.vllm_plugin.trace import learn_map
from deltawire_inference.vllm_plugin.verify import absorbed_names, differences


def parameter(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(*shape, dtype=dtype), requires_grad=False)


class OddModel(torch.nn.Module):
    """Fused rows, column slices, transposes, a concatenation, padding, experts, odd loaders."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = parameter(12, 8)
        self.row_parallel = parameter(8, 4)
        self.transposed = parameter(6, 10)
        self.joined = parameter(9)
        self.embedding = parameter(8, 8)
        self.computed = parameter(5)
        self.experts = parameter(3, 8, 6)
        self.bias = parameter(4)
        self.half_bias = parameter(4)
        self.wide = parameter(7, dtype=torch.float32)
        self.renewed = parameter(3)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        halves: dict[str, torch.Tensor] = {}
        for name, w in weights:
            match name:
                case "q" | "k" | "v":
                    self.qkv.data.narrow(0, 4 * "qkv".index(name), 4).copy_(w.narrow(0, 4, 4))
                case "row":
                    self.row_parallel.data.copy_(w.narrow(1, 4, 4))
                case "transposed":
                    self.transposed.data.copy_(w.t().contiguous())
                case "strided":
                    self.experts.data[2][:, :3].copy_(w.t()[::2, 1:4])
                case "expert":
                    self.experts.data[1].narrow(0, 4, 4)[:] = w
                case "left" | "right":
                    halves[name] = w
                    if len(halves) == 2:
                        self.joined.data.copy_(torch.cat([halves["left"], halves["right"]]))
                case "embedding":
                    self.embedding[:5].data.copy_(w)
                    self.embedding[5:].data.fill_(0)
                case "computed":
                    self.computed.data.copy_(w)
                    self.computed.data.copy_(-torch.exp(w.float()))
                case "zeroed":
                    w.zero_()
                    self.bias.data.copy_(w)
                case "half_zeroed":
                    w[2:].zero_()
                    self.half_bias.data.copy_(w)
                case "wide":
                    self.wide.data.copy_(w)
                case "renewed":
                    self.renewed = torch.nn.Parameter(w.clone(), requires_grad=False)
                case "broken":
                    raise RuntimeError("no loader for this one")


SHAPES: dict[str, tuple[int, ...]] = {
    "q": (8, 8),
    "k": (8, 8),
    "v": (8, 8),
    "row": (8, 8),
    "transposed": (10, 6),
    "strided": (5, 16),
    "expert": (4, 6),
    "left": (4,),
    "right": (5,),
    "embedding": (5, 8),
    "wide": (7,),
}
"""Tensors that can be patched."""

OPAQUE_SHAPES: dict[str, tuple[int, ...]] = {"computed": (5,), "half_zeroed": (4,)}
IGNORED_SHAPES: dict[str, tuple[int, ...]] = {"zeroed": (4,), "unused": (5, 8)}

ALL_SHAPES = SHAPES | OPAQUE_SHAPES | IGNORED_SHAPES


def specs(shapes: dict[str, tuple[int, ...]] = ALL_SHAPES) -> list[TensorSpec]:
    return [TensorSpec(name=n, shape=s, dtype=torch.bfloat16) for n, s in shapes.items()]


def random_weights(seed: int, shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=generator).bfloat16() for n, s in shapes.items()}


def loaded(weights: dict[str, torch.Tensor]) -> OddModel:
    model = OddModel()
    model.load_weights({n: w.clone() for n, w in weights.items()}.items())
    return model


def state(model: OddModel) -> dict[str, torch.Tensor]:
    return {n: bits(p.data.clone()) for n, p in model.named_parameters()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def test_learning_writes_nothing_and_sorts_names_into_mapped_opaque_and_ignored() -> None:
    model = loaded(random_weights(0, ALL_SHAPES))
    before = state(model)

    where = learn_map(model, specs())

    assert same(before, state(model))
    assert set(where.pieces) == set(SHAPES)
    assert set(where.opaque) == set(OPAQUE_SHAPES)
    assert where.ignored == set(IGNORED_SHAPES)


def test_only_the_concatenation_needs_a_table() -> None:
    where = learn_map(OddModel(), specs())

    tables = {n for n, ps in where.pieces.items() if any(isinstance(p, TablePiece) for p in ps)}

    assert tables == {"left", "right"}


def test_a_loader_that_registers_a_new_parameter_leaves_the_model_as_it_was() -> None:
    model = OddModel()
    before = model.renewed

    where = learn_map(model, specs({"renewed": (3,), "q": (8, 8)}))

    assert model.renewed is before
    assert where.ignored == {"renewed"}


def test_one_failing_loader_makes_only_its_own_name_opaque() -> None:
    where = learn_map(OddModel(), specs({"broken": (2,), "q": (8, 8), "row": (8, 8)}))

    assert set(where.pieces) == {"q", "row"}
    assert "no loader for this one" in where.opaque["broken"]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31), share=st.floats(0.01, 1.0), steps=st.integers(1, 4))
def test_patches_through_the_map_equal_loading_the_merged_checkpoint(
    seed: int, share: float, steps: int
) -> None:
    weights = random_weights(seed, ALL_SHAPES)
    model = loaded(weights)
    receiver = receiver_of(model)
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        changes = []
        for name in SHAPES:
            elements = weights[name].numel()
            count = max(1, int(elements * share))
            indices = torch.randperm(elements, generator=generator)[:count].sort().values
            values = torch.randint(-(2**15), 2**15, (count,), generator=generator)
            values = values.to(torch.int16).view(torch.bfloat16)
            weights[name].view(-1)[indices] = values
            changes.append((name, indices, values))
        receiver.stage_changes(f"v{step}", changes)
        receiver.apply(f"v{step}")
        receiver.apply(f"v{step}")

        assert same(state(model), state(loaded(weights)))


def receiver_of(model: OddModel) -> Receiver:
    receiver = Receiver(model)
    receiver.adopt(learn_map(model, specs()))
    return receiver


def test_a_whole_checkpoint_goes_in_and_comes_out_through_the_map() -> None:
    old, new = random_weights(1, ALL_SHAPES), random_weights(2, ALL_SHAPES)
    new |= {n: old[n] for n in OPAQUE_SHAPES}
    model = loaded(old)
    where, live = learn_map(model, specs()), LiveModel(model)
    for name in SHAPES:
        write_tensor(live, where, name, new[name])

    assert same(state(model), state(loaded(new)))
    for name in ("transposed", "left", "embedding", "expert", "wide"):
        assert torch.equal(read_tensor(live, where, name), new[name].view(-1))
        assert count_differences(live, where, name, new[name]) == 0
        assert count_differences(live, where, name, old[name]) > 0


def test_the_difference_to_a_checkpoint_names_exactly_the_changed_elements() -> None:
    old = random_weights(3, ALL_SHAPES)
    model = loaded(old)
    where, live = learn_map(model, specs()), LiveModel(model)
    new = {n: w.clone() for n, w in old.items()}
    new["transposed"].view(-1)[[3, 41]] = 7.5
    new["right"].view(-1)[2] = -0.0
    new["q"].view(-1)[0] = 9.0  # another rank's half

    found = {n: (i.tolist(), v.tolist()) for n, i, v in differing(live, where, new.items())}

    assert found["transposed"] == ([3, 41], [7.5, 7.5])
    assert found["right"][0] == [2]
    assert found["q"] == ([], [])


@pytest.mark.parametrize(
    ("name", "indices", "error"),
    [
        ("q", [3, 3], MalformedObject),
        ("q", [5, 4], MalformedObject),
        ("q", [64], MalformedObject),
        ("q", [-1], MalformedObject),
        ("computed", [0], UnmappableName),
        ("half_zeroed", [0], UnmappableName),
        ("no_such_tensor", [0], UnmappableName),
    ],
)
def test_a_bad_delta_is_refused_and_writes_nothing(
    name: str, indices: list[int], error: type[Exception]
) -> None:
    model = loaded(random_weights(4, ALL_SHAPES))
    receiver = receiver_of(model)
    before = state(model)
    good = ("row", torch.tensor([4]), torch.zeros(1).bfloat16())
    bad = (name, torch.tensor(indices), torch.zeros(len(indices)).bfloat16())

    with pytest.raises(error, match=name):
        receiver.stage_changes("v", [good, bad])
    with pytest.raises(MalformedObject, match="not staged"):
        receiver.apply("v")

    assert same(before, state(model))


def test_a_map_survives_its_file(tmp_path: Path) -> None:
    where = learn_map(OddModel(), specs())
    where.save(tmp_path / "rank-0.safetensors")

    read = CheckpointMap.load(tmp_path / "rank-0.safetensors")

    assert read.fingerprint() == where.fingerprint()
    indices = torch.arange(0, 60, 7)
    for name in SHAPES:
        inside = indices[indices < where.specs[name].elements]
        for a, b in zip(where.locate(name, inside), read.locate(name, inside), strict=True):
            assert a.target == b.target
            assert torch.equal(a.offsets, b.offsets)


def test_a_changed_map_has_another_fingerprint_and_its_plans_are_refused() -> None:
    where = learn_map(OddModel(), specs())
    narrower = learn_map(OddModel(), specs(SHAPES))
    plan = plan_patch(narrower, narrower.fingerprint(), [("q", torch.tensor([40]))])

    with pytest.raises(MalformedObject, match="plan again"):
        plan.require_fits(where, where.fingerprint())


def test_a_model_that_moved_in_memory_is_not_written_to() -> None:
    model = loaded(random_weights(5, ALL_SHAPES))
    receiver = receiver_of(model)
    receiver.stage_changes("v", [("row", torch.tensor([4]), torch.ones(1).bfloat16())])
    model.qkv.data = model.qkv.data.clone()

    with pytest.raises(ReplicaBroken, match=r"qkv.*moved"):
        receiver.apply("v")


def test_verify_finds_a_layout_that_was_shuffled_after_loading() -> None:
    weights = random_weights(6, ALL_SHAPES)
    model = loaded(weights)
    model.experts.data.copy_(model.experts.data.flip(1))
    where, live = learn_map(model, specs()), LiveModel(model)

    found = differences(live, where, weights.items())

    assert set(found) == {"strided", "expert"}


def test_latent_attention_with_copies_of_its_own_is_refused() -> None:
    model = torch.nn.Module()
    model.attention = torch.nn.Module()
    model.attention.W_UV = torch.zeros(2)
    where = learn_map(OddModel(), specs(SHAPES))
    where.pieces["layers.0.kv_b_proj.weight"] = where.pieces["q"]

    assert absorbed_names(model, where) == ["layers.0.kv_b_proj.weight"]
    assert absorbed_names(OddModel(), where) == []
    where.refuse(["q"], "for a reason")
    with pytest.raises(UnmappableName, match="for a reason"):
        where.require_mapped(["q"])


def test_a_tensor_served_narrower_than_published_is_refused() -> None:
    wide = [TensorSpec(name="row", shape=(8, 8), dtype=torch.float32), *specs({"q": (8, 8)})]

    where = learn_map(OddModel(), wide)

    assert set(where.opaque) == {"row"}
    assert "published as torch.float32, served as torch.bfloat16" in where.opaque["row"]
