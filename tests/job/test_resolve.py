"""Layers of a job: what wins, where it came from, and what is said of a wrong name."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltawire.job import Env, Job, Model, reward
from deltawire.job.presets import PRESETS, parameters_of, preset_for
from deltawire.job.resolve import resolve, setting_names
from deltawire.job.spec import LoraSpec
from deltawire.job.suggestion import nearest
from deltawire.protocol.errors import JobError


def job(**changes: object) -> Job:
    return Job(**{"name": "any", "env": "letters", **changes})  # type: ignore[arg-type]


def test_later_layers_win_and_each_value_names_its_layer() -> None:
    resolved = resolve(
        job(model="someone/Tiny-30M", train={"steps": 7, "lr": 1e-3}), ["train.lr=2e-6"]
    )
    assert resolved.spec.train.lr == 2e-6
    assert resolved.spec.train.steps == 7
    assert resolved.origins["train.lr"] == "command line"
    assert resolved.origins["train.steps"] == "job file"
    assert resolved.origins["train.warmup_steps"] == "preset tiny"
    assert resolved.origins["train.seed"] == "default"


def test_the_command_line_may_set_back_to_a_default_or_change_the_model() -> None:
    resolved = resolve(
        job(train={"kl_coef": 0.1}), ["train.kl_coef=0", "model=Qwen/Qwen3-8B", "env.sessions=4"]
    )
    assert resolved.spec.train.kl_coef == 0.0
    assert resolved.spec.model.source == "Qwen/Qwen3-8B"
    assert resolved.origins["train.lr"] == "preset large"
    assert resolved.spec.env.sessions == 4


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.learning_rate=1", "did you mean 'train.lr'"),
        ("trian.lr=1", "did you mean 'train.lr'"),
        ("lr=1", "did you mean 'train.lr'"),
        ("train.num_generations=4", "did you mean 'train.group_size'"),
        ("sampling.max_completion_length=4", "did you mean 'sampling.max_new_tokens'"),
        ("train.lr", "is not name=value"),
        ("train.lr=-1", "train.lr: Input should be greater than 0, found -1"),
        ("train.steps=many", "train.steps"),
        ("env.config.alphabt=abc", "did you mean 'alphabet'"),
    ],
)
def test_a_wrong_override_is_one_sentence_with_a_way_out(override: str, said: str) -> None:
    with pytest.raises(JobError, match=said):
        resolve(job(), [override])


def test_a_wrong_name_in_the_job_file_says_so() -> None:
    with pytest.raises(
        JobError, match=r"in the job file, setting 'train.learning_rate'.*'train.lr'"
    ):
        resolve(job(train={"learning_rate": 1e-5}))


def test_arguments_of_the_world_may_be_overridden() -> None:
    resolved = resolve(
        job(env=Env("letters", length=4)), ["env.config.length=6", "env.config.alphabet=xyz"]
    )
    assert resolved.spec.env.config == {"length": 6, "alphabet": "xyz"}
    assert resolved.world.config.length == 6  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("written", "overrides", "lora"),
    [
        ({}, [], None),
        ({}, ["train.lora.rank=8"], LoraSpec(rank=8)),
        ({}, ["train.lora=true"], LoraSpec()),
        (
            {},
            ['train.lora={"rank": 8, "targets": ["q_proj"]}'],
            LoraSpec(rank=8, targets=["q_proj"]),
        ),
        ({"lora": {}}, [], LoraSpec()),
        ({"lora": {"rank": 8}}, ["train.lora.alpha=4"], LoraSpec(rank=8, alpha=4)),
        ({"lora": {"rank": 8}}, ["train.lora=true"], LoraSpec(rank=8)),
        ({"lora": {"rank": 8}}, ["train.lora=null"], None),
        ({"lora": None}, ["train.lora.rank=2"], LoraSpec(rank=2)),
    ],
)
def test_an_adapter_is_switched_on_by_any_of_its_settings(
    written: dict[str, object], overrides: list[str], lora: LoraSpec | None
) -> None:
    assert resolve(job(train=written), overrides).spec.train.lora == lora


def test_pefts_own_words_lead_to_ours() -> None:
    for override in ("train.lora.r=8", "train.lora.lora_alpha=8", "train.lora.target_modules=x"):
        with pytest.raises(JobError, match=r"did you mean 'train.lora.(rank|alpha|targets)'"):
            resolve(job(), [override])
    with pytest.raises(JobError, match=r"did you mean 'train\.lora\.rank'"):
        resolve(job(train={"lora": {"r": 8}}))


def test_an_adapter_learns_at_ten_times_the_presets_rate_and_at_a_given_one_as_it_is() -> None:
    full, low = (resolve(job(), lora) for lora in ([], ["train.lora.rank=8"]))
    assert low.spec.train.lr == pytest.approx(10 * full.spec.train.lr)
    assert "LoRA" in low.origins["train.lr"]
    assert resolve(job(), ["train.lora.rank=8", "train.lr=3e-5"]).spec.train.lr == 3e-5


def test_resolving_does_not_change_the_job() -> None:
    written = job(train={"lora": {"rank": 8}})
    resolve(written, ["train.lora.rank=4"])
    assert written.train == {"lora": {"rank": 8}}


def test_a_world_that_counts_turns_follows_the_jobs_limit() -> None:
    assert resolve(job(env=Env("guess", max_turns=3))).world.config.max_turns == 3  # type: ignore[attr-defined]


def test_rewards_are_named_with_their_weights() -> None:
    @reward(weight=0.5)
    def short(episode: object) -> float:
        return 0.0

    def plain(episode: object) -> float:
        return 0.0

    assert resolve(job(rewards=[short, plain])).spec.rewards == ["short*0.5", "plain*1"]
    with pytest.raises(JobError, match="a reward is a function"):
        resolve(job(rewards=["short"]))


def test_a_preset_may_be_chosen_by_name_and_a_wrong_one_gets_a_suggestion() -> None:
    chosen = resolve(job(model=Model("any/model", preset="large")))
    assert chosen.spec.train.gradient_checkpointing
    with pytest.raises(JobError, match="did you mean 'large'"):
        resolve(job(model=Model("any/model", preset="larg")))


@pytest.mark.parametrize(
    ("source", "parameters"),
    [
        ("HuggingFaceTB/SmolLM2-135M-Instruct", 135e6),
        ("Qwen/Qwen3-0.6B", 0.6e9),
        ("meta-llama/Llama-3.2-1B", 1e9),
        ("Qwen/Qwen2.5-Coder-32B-Instruct", 32e9),
        ("someone/my-model", None),
        ("gpt2", None),
    ],
)
def test_the_size_of_a_model_is_read_from_its_name(source: str, parameters: float | None) -> None:
    assert parameters_of(source) == parameters


def test_the_size_of_a_folder_is_read_from_its_files(tmp_path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(2000))
    assert parameters_of(str(tmp_path)) == 1000


def test_every_preset_sets_only_known_names() -> None:
    known = set(setting_names())
    for preset in PRESETS:
        assert set(preset.values) <= known
    assert [preset_for(size).name for size in (1e7, 1.35e8, 1e9, 8e9, 7e10)] == [
        preset.name for preset in PRESETS
    ]


@given(st.sampled_from(setting_names()), st.integers(0, 30), st.sampled_from("xyz_"))
def test_one_wrong_letter_still_finds_the_name(name: str, at: int, letter: str) -> None:
    at %= len(name)
    if name[at] == ".":
        return
    assert nearest(name[:at] + letter + name[at + 1 :], setting_names()) is not None


def test_an_env_needs_a_world_or_a_data_set() -> None:
    with pytest.raises(JobError, match="a world or a data set"):
        Env()


def test_without_a_turn_limit_the_worlds_own_holds() -> None:
    class Endless:
        def reset(self) -> str:
            return "Go."

        def step(self, message: str) -> str:
            return "On."

    for env, turns in (("letters", 1), ("guess", 6), (Endless, 10)):
        resolved = resolve(job(env=env))
        assert resolved.spec.env.max_turns == turns
        assert resolved.origins["env.max_turns"] == ("world" if turns > 1 else "default")
