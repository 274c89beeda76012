"""Run by test_sharded.py in two processes: an FSDP2 model is trained, published and followed.

python sharded_ranks.py FOLDER RANK     rank 0 prints what it saw as one JSON line
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import deltawire
from deltawire.codec.bits import bits_of
from deltawire.protocol.errors import DeltawireError
from deltawire.sync.loop_publisher import LoopPublisher
from deltawire.sync.model_weights import named_weights

RANKS = 2


class Model(torch.nn.Module):
    """Odd sizes, so that shards are uneven, one is empty, and one tensor is not sharded."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 5, dtype=dtype)
        self.one_row = torch.nn.Linear(5, 1, dtype=dtype)
        self.register_buffer("scale", torch.ones((), dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.one_row(torch.tanh(self.first(x))) * self.scale
        return out


def whole_bits(model: torch.nn.Module) -> dict[str, str]:
    """What a bf16 replica must hold. Collective: the test may gather, the product must not."""
    found = {}
    for name, tensor in named_weights(model):
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        found[name] = bits_of(full.detach().to(torch.bfloat16)).tobytes().hex()
    return found


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    loss = model(torch.full((4, 8), 0.1 + rank)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def forbid_gathering() -> None:
    def refused(*_: object) -> torch.Tensor:
        raise AssertionError("a full tensor was gathered")

    DTensor.full_tensor, DTensor.redistribute = refused, refused  # type: ignore[method-assign, assignment]


def main(folder: Path, rank: int) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS
    )
    gathering = DTensor.full_tensor, DTensor.redistribute
    torch.manual_seed(0)
    model = Model()
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    replica = Model(torch.bfloat16)
    seen: list[object] = []

    def published(publisher: LoopPublisher) -> None:
        """Compare at the newest version, on rank 0."""
        version = publisher.wait()
        DTensor.full_tensor, DTensor.redistribute = gathering  # type: ignore[method-assign]
        expected = whole_bits(model)
        if rank == 0:
            assert follower.apply_to(replica) == version
            seen.append([version, whole_bits(replica) == expected])

    def open_publisher(**options: object) -> LoopPublisher:
        return deltawire.publish(
            model,
            store=f"file://{folder}/bucket",
            owner_file=folder / "owner",
            anchor_every=2,
            **options,  # type: ignore[arg-type]
        )

    publisher = open_publisher()
    follower = deltawire.follow(f"file://{folder}/bucket")
    publisher.attach(optimizer)
    for _ in range(3):
        forbid_gathering()
        train(model, optimizer, rank)
        published(publisher)
    publisher.close()

    # A restart whose weights are not what was published: rank 0 replays, all ranks take it over.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, rank)
    dist.barrier()
    publisher = open_publisher()
    published_before = publisher.wait()
    publisher.step()
    published(publisher)
    publisher.finish()
    publisher.close()

    # Taken over: every rank is told, none hangs.
    publisher = open_publisher()
    if rank == 0:
        usurper = deltawire.publish(
            _whole_copy(), store=f"file://{folder}/bucket", take_over=True, dtype=torch.bfloat16
        )
        usurper.close()
    dist.barrier()
    told = "nothing"
    try:
        for _ in range(2):
            publisher.step()
    except DeltawireError as error:
        told = type(error).__name__
    publisher.close()
    rows: list[object] = [None] * RANKS
    dist.all_gather_object(rows, told)
    if rank == 0:
        links = [[str(link.kind), link.version] for link in follower.follower.head().links]
        follower.close()
        sys.stdout.write(
            json.dumps({"seen": seen, "resumed_at": published_before, "links": links, "told": rows})
            + "\n"
        )
    dist.barrier()
    dist.destroy_process_group()


def _whole_copy() -> torch.nn.Module:
    """A model of the same layout, held by one process."""
    return Model()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]))
