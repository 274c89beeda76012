"""Writes the golden files of TRL's delta formats by hand: from their tables, not with our codec.

    python tests/golden/make_foreign.py

safetensors: u64 header length, JSON header, data. All metadata values are strings, booleans are
"True" and "False".
"""

import json
import struct
from pathlib import Path

HERE = Path(__file__).parent
BF16_ONE, BF16_TWO, BF16_MINUS_ZERO = 0x3F80, 0x4000, 0x8000


def main() -> None:
    values = struct.pack("<3H", BF16_ONE, BF16_MINUS_ZERO, BF16_TWO)
    v0 = {
        "sparse": "True",
        "model_version": "7",
        "num_changed_params": "1",
        "total_changed_elements": "3",
        "total_elements": "70004",
        "sparsity": "0.99995714530598",
        "changed_params": '["layers.0.weight"]',
    }
    write(
        "trl_v0_delta.safetensors",
        v0,
        [
            ("layers.0.weight.indices", "I32", [3], struct.pack("<3i", 0, 5, 69999)),
            ("layers.0.weight.values", "BF16", [3], values),
        ],
    )
    v1 = {
        "format": "sparse_weight_patch",
        "version": "1",
        "sparse": "True",
        "model_version": "7",
        "num_changed_params": "2",
        "total_changed_elements": "3",
        "total_elements": "70004",
        "sparsity": "0.99995714530598",
    }
    nothing = [
        ("norm.weight.idx", "U16", [0], b""),
        ("norm.weight.val", "BF16", [0], b""),
    ]
    write(
        "trl_v1_raw.safetensors",
        v1 | {"encoding": "raw"},
        [
            ("layers.0.weight.idx", "I32", [3], struct.pack("<3i", 0, 5, 69999)),
            ("layers.0.weight.val", "BF16", [3], values),
        ],
    )
    write(
        "trl_v1_gap_u32.safetensors",
        v1 | {"encoding": "gap_delta"},
        [
            ("layers.0.weight.idx", "U32", [3], struct.pack("<3I", 0, 4, 69993)),
            ("layers.0.weight.val", "BF16", [3], values),
            *nothing,
        ],
    )
    write(
        "trl_v1_gap_u16.safetensors",
        v1 | {"encoding": "gap_delta"},
        [
            ("layers.0.weight.idx", "U16", [3], struct.pack("<3H", 0, 4, 60000)),
            ("layers.0.weight.val", "BF16", [3], values),
            *nothing,
        ],
    )
    write(
        "trl_v1_nvcomp.safetensors",
        v1 | {"encoding": "nvcomp_cascaded"},
        [
            ("layers.0.weight.idx", "U8", [4], b"\0\1\2\3"),
            ("layers.0.weight.val", "BF16", [3], values),
        ],
    )
    anchor = {"sparse": "False", "model_version": "1"}
    write(
        "trl_v0_anchor.safetensors",
        anchor,
        [("norm.weight", "BF16", [4], struct.pack("<4H", BF16_ONE, BF16_TWO, 0, BF16_MINUS_ZERO))],
    )


def write(name: str, metadata: dict, arrays: list[tuple[str, str, list[int], bytes]]) -> None:
    header: dict = {"__metadata__": metadata}
    at = 0
    for key, dtype, shape, data in arrays:
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    body = json.dumps(header).encode()
    body += b" " * (-len(body) % 8)
    data = b"".join(data for *_, data in arrays)
    (HERE / name).write_bytes(struct.pack("<Q", len(body)) + body + data)


if __name__ == "__main__":
    main()
