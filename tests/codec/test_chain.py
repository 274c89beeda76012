"""The property that matters most: base + any chain is bit-identical to the trainer's weights."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltawire.codec.anchor import iter_anchor, write_anchor
from deltawire.codec.apply import LiveTensors, scatter
from deltawire.codec.decode import decode_delta, read_header
from deltawire.codec.diff import Shadow
from deltawire.codec.digest import check_digests, digest_full
from deltawire.codec.encode import encode_delta
from deltawire.codec.patch import Layout

from .models import densities, header_of, mutate, random_bits, seeds, specs, tensors_of

ENCODINGS = ["seed", "compact", "classes", "auto"]


@pytest.mark.parametrize("encoding", ENCODINGS)
@given(specs=specs, seed=seeds, steps=st.lists(densities, min_size=1, max_size=4))
@settings(max_examples=25, deadline=None)
def test_an_anchor_and_any_chain_of_deltas_rebuild_the_trainers_bits(
    encoding: str, specs: list, seed: int, steps: list[float]
) -> None:
    layout, rng = Layout(specs), np.random.default_rng(seed)
    truth = random_bits(layout, rng)
    shadow = Shadow.of(tensors_of(truth, layout).items(), layout)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "object.safetensors"
        digest = shadow.digest()
        write_anchor(shadow.named_bits(), header_of(0, new_digest=str(digest)), path, layout=layout)
        replica = LiveTensors(tensors_of(dict(iter_anchor(path, layout)), layout).items(), layout)
        held = digest_full(replica.named_bits(), layout)

        for version, density in enumerate(steps, start=1):
            truth = mutate(truth, layout, density, rng)
            patches = shadow.diff(tensors_of(truth, layout).items())
            new = digest.updated(patches, layout)
            header = header_of(version, base_digest=str(digest), new_digest=str(new))
            encode_delta(
                patches,
                header,
                path,
                layout=layout,
                encoding=encoding,
                base=shadow.before(patches),
                link_bytes_per_s=1e3,
            )
            shadow.commit()
            digest = new

            staged = decode_delta(path, layout, replica)
            held = check_digests(read_header(path), staged, layout, held=held, name=path.name)
            scatter(replica, staged)

    for name, bits in replica.named_bits():
        assert np.array_equal(bits, truth[name])
    assert held == digest == digest_full(truth.items(), layout)
