"""Make the two word lists of the five-letter guessing game from Debian's SCOWL packages.

    apt-get download wamerican-small wamerican
    for deb in *.deb; do dpkg -x "$deb" scowl; done
    python make_words.py scowl/usr/share/dict/american-english-small \
        scowl/usr/share/dict/american-english OUT_FOLDER

``answers.txt``: secrets, from the small list (common words), without plain -s forms.
``allowed.txt``: every guess that counts as a real word, from the larger list; holds all answers.
Both are sorted, one lower-case ASCII word a line. The notice in ``NOTICE`` must travel with them.
"""

import codecs
import re
import sys
from pathlib import Path

# Slurs and sexual or scatological words, in ROT13 so that nobody has to read them here.
EXCLUDED_ROT13 = """
onjql ovzob ovgpu obare obbof obbol puvax pbpxf pbbaf pencf phagf qvpxf qvpxl qlxrq qlxrf sntbg
snaal snegf srprf shpxf tbbxf tlcfl ubeal uhffl ylapu zbeba avttn ahqrf cnafl cravf cvzcf cbeab
cevpx chovp chxrq chxrf chffl dhrre encrq encrf frzra frkrq frkrf fuvgf fvffl fyntf fynir fyhgf
fcrez fchax fdhnj gnegf gheqf jnaxf jrapu juber
"""

WORD = re.compile(r"[a-z]{5}")


def excluded_words() -> set[str]:
    """The words neither list may hold."""
    return set(codecs.decode(EXCLUDED_ROT13, "rot13").split())


def read_dictionary(path: Path) -> set[str]:
    """All lower-case ASCII words of a dictionary file, of any length."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return {line for line in lines if re.fullmatch(r"[a-z]+", line)}


def is_s_form(word: str, dictionary: set[str]) -> bool:
    """True for a plural or third person: ``crabs``, ``boxes``, ``flies``; false for ``focus``."""
    if not word.endswith("s") or word.endswith("ss"):
        return False
    stems = {word[:-1], word[:-2] if word.endswith("es") else "", word[:-3] + "y"}
    return bool(stems & dictionary)


def main() -> None:
    small, large, out = (Path(argument) for argument in sys.argv[1:])
    common, known = read_dictionary(small), read_dictionary(large)
    barred = excluded_words()
    allowed = {word for word in common | known if WORD.fullmatch(word)} - barred
    answers = {word for word in allowed & common if not is_s_form(word, known)}
    for name, words in (("answers.txt", answers), ("allowed.txt", allowed)):
        (out / name).write_text("\n".join(sorted(words)) + "\n", encoding="ascii")
        sys.stderr.write(f"{name}: {len(words)} words\n")


if __name__ == "__main__":
    main()
