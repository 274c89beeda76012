"""Sorted positions as gaps: one byte stream that zstd codes to within 0.4 % of the entropy bound.

The gaps of independent changes are geometric. A gap is cut into its low `shift` bits, stored raw,
and a quotient, stored with *additive escapes*: 255 q + r is q bytes 255 and one byte r. A geometric
law has no memory, so r after an escape follows the law of any r, and one Huffman table fits every
byte. Literals are all there is to code, so zstd is told to look for next to no matches.
"""

import numpy as np
import zstandard

from deltawire.codec import kernels
from deltawire.codec.bits import BitArray, IndexArray
from deltawire.protocol.errors import MalformedObject

MAX_SHIFT = 40
_MEAN_QUOTIENT = 128
"""Shift until the mean quotient is below this: measured best between 50 and 200."""
_LITERALS = zstandard.ZstdCompressionParameters(
    window_log=17,
    hash_log=6,
    chain_log=6,
    search_log=1,
    min_match=7,
    target_length=0,
    strategy=zstandard.STRATEGY_FAST,
)
_MAX_WINDOW = 1 << 27


def shift_of(count: int, span: int) -> int:
    """Low bits to store raw for `count` changes among `span` elements."""
    shift = 0
    while (span >> shift) >= _MEAN_QUOTIENT * max(count, 1) and shift < MAX_SHIFT:
        shift += 1
    return shift


def low_bytes(count: int, shift: int) -> int:
    """Bytes that the raw bits of `count` gaps take."""
    return (count * shift + 7) // 8


def pack_gaps(gaps: IndexArray, shift: int) -> tuple[BitArray, BitArray]:
    """(quotient bytes, packed low bits) of gaps >= 0."""
    escapes = int((gaps >> shift).sum(dtype=np.int64)) // 255 if gaps.size else 0
    quotients = np.empty(gaps.size + escapes, np.uint8)
    low = np.empty(low_bytes(gaps.size, shift), np.uint8)
    size = kernels.load().encode_gaps(gaps, shift, quotients, low)
    return quotients[:size], low


def unpack_gaps(
    quotients: BitArray, low: BitArray, shift: int, count: int, *, name: str
) -> IndexArray:
    """The gaps, int64. Raises MalformedObject unless the bytes hold exactly `count` of them."""
    gaps = np.empty(count, np.int64)
    if low.size != low_bytes(count, shift) or not kernels.load().decode_gaps(
        quotients, low, shift, gaps
    ):
        raise MalformedObject(f"{name}: the gap stream does not hold {count} positions")
    return gaps


def gaps_of(positions: IndexArray) -> IndexArray:
    """Distance of each position to the one before it, less one; the first counts from -1."""
    return np.diff(positions, prepend=positions.dtype.type(-1)) - positions.dtype.type(1)


def positions_of(gaps: IndexArray, span: int, *, name: str) -> IndexArray:
    """The inverse of ``gaps_of``. Raises MalformedObject beyond `span`. Reuses the array."""
    if gaps.size and int(gaps.max()) >= span:
        raise MalformedObject(f"{name}: a position beyond the {span} elements of its segment")
    np.add(gaps, 1, out=gaps)
    np.cumsum(gaps, out=gaps)
    np.subtract(gaps, 1, out=gaps)
    if gaps.size and int(gaps[-1]) >= span:
        raise MalformedObject(f"{name}: a position beyond the {span} elements of its segment")
    return gaps


def squeeze(data: BitArray) -> bytes:
    """One zstd frame over bytes that have no repetition worth finding; empty for none."""
    if not data.size:
        return b""
    return zstandard.ZstdCompressor(compression_params=_LITERALS).compress(data.tobytes())


def unsqueeze(frame: BitArray, *, least: int, most: int, name: str) -> BitArray:
    """The bytes of a frame. The size it declares must lie in [least, most] before any of it is
    allocated. Raises MalformedObject."""
    if not frame.size and least == 0:
        return np.empty(0, np.uint8)
    body = frame.tobytes()
    try:
        size = zstandard.frame_content_size(body)
        if not least <= size <= most:
            raise MalformedObject(f"{name}: a stream declares {size} bytes, at most {most} fit")
        opened = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)
        data = opened.decompress(body, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise MalformedObject(f"{name}: a stream does not decompress: {error}") from error
    if len(data) != size:
        raise MalformedObject(f"{name}: a stream declares {size} bytes, {len(data)} came out")
    return np.frombuffer(bytearray(data), np.uint8)
