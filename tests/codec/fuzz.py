"""Mutate files and decode them: a typed error, or exactly what was written. Nothing else.

    python tests/codec/fuzz.py [FILES] [SEED]

decodes FILES mutated anchors and deltas of every encoding (default 1,000,000, the nightly dose)
under a limit on memory. Any other exception, a crash, or a wrong acceptance ends it with the seed
and number that reproduce it. Acceptance is what a follower does: header against the link, then
both digests; the sha256 of the file, which would catch nearly all of this, is left out.
"""

import json
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from deltawire.codec import segments
from deltawire.codec.anchor import iter_anchor, write_anchor
from deltawire.codec.bits import BitArray, IndexArray
from deltawire.codec.decode import decode_delta, read_header
from deltawire.codec.digest import check_digests, digest_full
from deltawire.codec.encode import encode_delta
from deltawire.codec.patch import Layout, SparsePatch
from deltawire.protocol.chain import TensorSpec
from deltawire.protocol.errors import ProtocolError, WeightsError
from deltawire.protocol.header import ObjectHeader
from deltawire.protocol.versions import PolicyVersion

MEMORY_BYTES = 512 * 2**20
"""What decoding small files may take on top of the loaded libraries."""
LAYOUT = Layout(
    [
        TensorSpec(name="embed", shape=[90, 46], dtype="BF16"),
        TensorSpec(name="norm", shape=[40], dtype="BF16"),
        TensorSpec(name="half", shape=[400], dtype="F16"),
        TensorSpec(name="tiny", shape=[300], dtype="F8_E4M3"),
        TensorSpec(name="whole", shape=[60], dtype="F32"),
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One file, and what it must decode to."""

    name: str
    body: bytes
    header: ObjectHeader
    patches: list[SparsePatch]


class Weights:
    """The base weights, as old values and to compare with."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.before: dict[str, BitArray] = {}
        self.after: dict[str, BitArray] = {}
        for name, tensor in LAYOUT.items():
            line = rng.integers(30, 90, tensor.numel) << (4 * (tensor.bits.itemsize - 1))
            move = rng.choice(np.array([0, 0, 0, 0, 1, -1, 1, -1, 9, 77]), tensor.numel)
            self.before[name] = line.astype(tensor.bits)
            self.after[name] = (line + move).astype(tensor.bits)
        self.base = digest_full(self.before.items(), LAYOUT)
        self.new = digest_full(self.after.items(), LAYOUT)

    def gather(self, name: str, indices: IndexArray) -> BitArray:
        return self.before[name][indices]

    def read(self, name: str, begin: int, end: int) -> BitArray:
        return self.before[name][begin:end]

    def patches(self) -> list[SparsePatch]:
        found = []
        for name in LAYOUT:
            old, new = self.before[name], self.after[name]
            at = np.flatnonzero(old != new).astype(np.int32)
            found.append(SparsePatch(name=name, indices=at, values=new[at], old=old[at]))
        return found


def cases(weights: Weights, folder: Path) -> list[Case]:
    """A file of every kind."""
    path = folder / "case"
    patches = weights.patches()
    bare = [SparsePatch(name=p.name, indices=p.indices, values=p.values) for p in patches]
    header = ObjectHeader(
        sparse=True,
        model_version=PolicyVersion(5),
        base_version=PolicyVersion(4),
        run_id="run",
        base_digest=str(weights.base),
        new_digest=str(weights.new),
    )
    found = []
    for name, encoding, given in (
        ("seed", "seed", patches),
        ("compact", "compact", patches),
        ("absolute", "compact", bare),
        ("classes", "classes", patches),
        ("v1 raw", "raw", patches),
        ("v1 gaps", "gap_delta", patches),
    ):
        report = encode_delta(given, header, path, layout=LAYOUT, encoding=encoding, base=weights)
        assert report.encoding == encoding, f"{name} fell back to {report.encoding}"
        found.append(Case(name=name, body=path.read_bytes(), header=report.header, patches=patches))
    for name in ("plain", "packed"):
        write_anchor(weights.after.items(), header, path, layout=LAYOUT, packed=name == "packed")
        found.append(Case(name=name, body=path.read_bytes(), header=read_header(path), patches=[]))
    return found


def verdict(case: Case, path: Path, weights: Weights) -> str:
    """What a follower makes of a file: the error, or "right". Raises on wrong acceptance."""
    try:
        header = read_header(path)
        if not case.header.sparse:
            anchor = dict(iter_anchor(path, LAYOUT))
            if digest_full(anchor.items(), LAYOUT) != weights.new:
                return "DigestMismatch"
            assert all(np.array_equal(anchor[n], weights.after[n]) for n in LAYOUT)
            return "right"
        patches = decode_delta(path, LAYOUT, weights)
        if case.name.startswith("v1"):
            return "unchecked"  # it has no digests: any well-formed content is accepted
        said = (header.model_version, header.base_version, header.run_id)
        if said != (5, 4, "run"):
            return "OtherLink"
        if str(check_digests(header, patches, LAYOUT, held=weights.base, name="f")) != str(
            weights.new
        ):
            return "OtherLink"
    except (WeightsError, ProtocolError) as error:
        return type(error).__name__
    live = {name: bits.copy() for name, bits in weights.before.items()}
    for patch in patches:
        live[patch.name][patch.indices] = patch.values
    assert all(np.array_equal(live[n], weights.after[n]) for n in LAYOUT), "wrong acceptance"
    return "right"


def mutated(body: bytes, rng: np.random.Generator) -> bytes:
    """One to three mutations."""
    for _ in range(int(rng.integers(1, 4))):
        body = MUTATIONS[int(rng.integers(len(MUTATIONS)))](body, rng)
    return body


def flip_bit(body: bytes, rng: np.random.Generator) -> bytes:
    if not body:
        return body
    at = int(rng.integers(len(body)))
    return body[:at] + bytes([body[at] ^ (1 << int(rng.integers(8)))]) + body[at + 1 :]


def set_byte(body: bytes, rng: np.random.Generator) -> bytes:
    at = int(rng.integers(len(body) + 1))
    return body[:at] + bytes([int(rng.choice([0, 1, 127, 128, 255]))]) + body[at + 1 :]


def cut(body: bytes, rng: np.random.Generator) -> bytes:
    return body[: int(rng.integers(len(body) + 1))]


def extend(body: bytes, rng: np.random.Generator) -> bytes:
    return body + rng.bytes(int(rng.integers(1, 40)))


def swap(body: bytes, rng: np.random.Generator) -> bytes:
    """Two stretches change places."""
    a, b, c = sorted(rng.integers(0, len(body) + 1, 3).tolist())
    return body[:a] + body[b:c] + body[a:b] + body[c:]


def set_word(body: bytes, rng: np.random.Generator) -> bytes:
    """An aligned 64-bit word becomes a number that asks for trouble: tables are made of those."""
    at = int(rng.integers(max(len(body) // 8, 1))) * 8
    at = max(at, _data_begin(body)) if rng.random() < 0.7 else at
    word = int(rng.choice([-1, 0, 1, 2, 255, 2**16, 2**31 - 1, 2**31, 2**40, 2**62, -(2**62)]))
    return body[:at] + word.to_bytes(8, "little", signed=True) + body[at + 8 :]


def flip_data_bit(body: bytes, rng: np.random.Generator) -> bytes:
    """A bit behind the header."""
    begin = _data_begin(body)
    return body[:begin] + flip_bit(body[begin:], rng) if begin < len(body) else body


def _data_begin(body: bytes) -> int:
    return 8 + int.from_bytes(body[:8], "little")


def edit_header(body: bytes, rng: np.random.Generator) -> bytes:
    """A field of a well-formed header gets another value; lengths and offsets stay right."""
    size = int.from_bytes(body[:8], "little")
    try:
        header = json.loads(body[8 : 8 + size])
        places = list(_places(header))
    except (ValueError, RecursionError):
        return body
    if not places:
        return body
    holder, key = places[int(rng.integers(len(places)))]
    odd = [
        0,
        -1,
        1,
        2**31,
        2**62,
        2**70,
        1.5,
        None,
        True,
        "",
        "seed",
        "classes",
        "I64",
        [],
        {},
        [[]],
    ]
    holder[key] = odd[int(rng.integers(len(odd)))]
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body[8 + size :]


def _places(node: object):  # type: ignore[no-untyped-def]
    """Every (container, key) of a JSON value."""
    keys = node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
    for key in list(keys):
        yield node, key
        yield from _places(node[key])


MUTATIONS: list[Callable[[bytes, np.random.Generator], bytes]] = [
    *(flip_bit, flip_data_bit, set_byte, cut, extend, swap, set_word, edit_header)
]


def fuzz(files: int, seed: int) -> Counter[str]:
    """Decode `files` mutated files. Returns how often each verdict was given."""
    segments.UNIT_ELEMENTS, segments.ENOUGH_CHANGES = 2048, 300  # several segments in a small file
    weights = Weights(np.random.default_rng(7))
    counts: Counter[str] = Counter()
    memory = Path("/dev/shm")  # two files a verdict: a disk would set the pace
    with TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        originals = cases(weights, Path(folder))
        path = Path(folder) / "mutated"
        for case in originals:
            path.write_bytes(case.body)
            assert verdict(case, path, weights) in ("right", "unchecked"), case.name
        _limit_memory()
        for number in range(files):
            rng = np.random.default_rng([seed, number])
            case = originals[number % len(originals)]
            path.write_bytes(mutated(case.body, rng))
            try:
                counts[verdict(case, path, weights)] += 1
            except BaseException:
                sys.stderr.write(f"seed {seed} number {number}: a mutated {case.name} file\n")
                raise
    return counts


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    began = time.monotonic()
    wanted = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    found = fuzz(wanted, int(sys.argv[2]) if len(sys.argv) > 2 else int(time.time()))
    row = {"files": wanted, "seconds": round(time.monotonic() - began, 1), **found}
    sys.stdout.write(json.dumps(row) + "\n")
