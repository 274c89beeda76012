"""The scatter stores bits, on every device there is, and moves nothing else."""

import pytest
import torch

from deltawire_inference.vllm_plugin.live import bits
from deltawire_inference.vllm_plugin.scatter import scatter

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_bit_pattern_arrives_at_its_place_and_nowhere_else(
    device: str, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    width = torch.empty(0, dtype=dtype).element_size()
    patterns = torch.randint(0, 256, (2000 * width,), generator=generator, dtype=torch.uint8)
    flat = patterns.clone().view(dtype).to(device)
    offsets = torch.randperm(2000, generator=generator)[:700].sort().values
    values = torch.randint(0, 256, (700 * width,), generator=generator, dtype=torch.uint8)
    expected = bits(patterns.clone().view(dtype))
    expected[offsets] = bits(values.view(dtype))
    address = flat.data_ptr()

    scatter(flat, offsets.to(device), values.view(dtype).to(device))

    assert torch.equal(bits(flat.cpu()), expected)
    assert flat.data_ptr() == address
