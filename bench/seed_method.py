"""The seed's way of doing things, as the blog and TRL 5417 describe it, to measure against.

Detect: before the optimizer step a bf16 clone of every parameter; after it cast again, compare,
take the nonzero positions and the values. Apply: keep a full snapshot, cast indices to int64, put
the values in, and load every tensor back into the model.
"""

from collections.abc import Sequence

import torch

Named = Sequence[tuple[str, torch.Tensor]]
Sparse = list[tuple[int, torch.Tensor, torch.Tensor]]


def snapshot(before: Named) -> list[torch.Tensor]:
    """The clone ahead of the step."""
    return [tensor.detach().to(torch.bfloat16).cpu().clone() for _, tensor in before]


def detect(after: Named, kept: list[torch.Tensor]) -> Sparse:
    """Positions (int32) and values of what differs, tensor by tensor."""
    found: Sparse = []
    for number, ((_, tensor), old) in enumerate(zip(after, kept, strict=True)):
        mask = tensor.detach().to(torch.bfloat16).cpu() != old
        values = tensor.detach().to(torch.bfloat16).reshape(-1)
        indices = mask.reshape(-1).nonzero(as_tuple=True)[0]
        if indices.numel():
            found.append((number, indices.to(torch.int32), values[indices]))
    return found


def apply(live: Named, kept: list[torch.Tensor], changes: Sparse) -> None:
    """Update the snapshot, then reload every tensor that changed from it, whole."""
    for number, indices, values in changes:
        flat = kept[number].flatten()
        flat[indices.long()] = values
        kept[number] = flat.reshape(kept[number].shape)
        live[number][1].copy_(kept[number])
