"""Tensors <-> bytes: diff, encode, decode, apply, digest. No network, no chain, no policy.

| file | noun |
|---|---|
| patch.py | ``SparsePatch``, ``Layout``, ``OldValues``: what changed, and where names stand |
| diff.py, diff_device.py | ``Shadow``: the published bits; ``diff`` / ``commit`` / ``rollback`` |
| digest.py | ``Digest``, ``digest_full``, ``check_digests``: the running sum over the weights |
| encode.py, decode.py | ``encode_delta``, ``decode_delta``, ``read_header``: the front doors |
| seed.py | int32 positions and whole values: TRL's v0 |
| compact.py, classes.py | the small encodings |
| positions.py, values.py, segments.py, segment_file.py | their parts |
| foreign.py | TRL's two delta formats, both ways |
| merge.py | ``merge_deltas``: several deltas as one |
| warm.py | ``warm``: compile the inner loops ahead of their first use |
| inspect.py | ``inspect_delta``: a delta in numbers, for people |
| anchor.py | ``write_anchor``, ``iter_anchor``: every tensor of a version |
| apply.py | ``LiveTensors``, ``gather``, ``scatter``, ``reverse``: patches onto live weights |
| bits.py, container.py, kernels*.py, parallel.py | dtypes as bits, files, the inner loops |
"""
