"""Text that comes token by token says what the whole would have said."""

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from deltawire.rollout.tokenizer import ChatTokenizer
from deltawire_inference.text import Speech, spoken

_LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_tokenizer() -> ChatTokenizer:
    """One token a byte: most characters beyond ASCII need several."""
    inner = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(_LETTERS)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return ChatTokenizer(inner, template="{{ messages }}", special={})


TOKENIZER = byte_tokenizer()
texts = st.text(st.sampled_from("ab\n é漢🙂"), max_size=30)
stops = st.lists(st.sampled_from(["\n\n", "ab", "é", "漢a", "🙂🙂"]), max_size=2)


@settings(max_examples=300, deadline=None)
@given(text=texts, stop=stops, cut=st.integers(0, 3))
def test_pieces_join_to_the_whole_text_before_the_stop(
    text: str, stop: list[str], cut: int
) -> None:
    ids = TOKENIZER.encode(text)[: -cut or None]
    speech = Speech(TOKENIZER, stop)

    pieces = [speech.add(token_id) for token_id in ids]
    pieces.append(speech.end())

    assert "".join(pieces) == spoken(TOKENIZER, ids, stop)
    assert all("\ufffd" not in piece for piece in pieces[:-1])


def test_a_stop_string_is_never_said_even_in_part() -> None:
    speech = Speech(TOKENIZER, ["STOP"])

    said = [speech.add(token_id) for token_id in TOKENIZER.encode("go STOP on")]

    assert "".join(said) + speech.end() == "go "
