"""`deltawire.publish` and `deltawire.follow`: the product in anyone's own loop.

with deltawire.publish(model, store="hf://buckets/me/weights") as publisher:
    publisher.attach(optimizer)            # or publisher.step() after optimizer.step()
    ...train...

follower = deltawire.follow("hf://buckets/me/weights")
follower.apply_to(replica_model)           # now and then; returns the version
"""

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from pydantic import SecretStr
from torch.distributed.tensor import DTensor

from deltawire.codec.bits import word_of
from deltawire.codec.encode import Encoding
from deltawire.codec.patch import Layout
from deltawire.store.base import Store
from deltawire.store.open import open_store
from deltawire.sync.follower import Follower
from deltawire.sync.founding import enter_run
from deltawire.sync.loop_follower import ModelFollower
from deltawire.sync.loop_publisher import LoopPublisher, ModelPublisher, SilentRank
from deltawire.sync.model_weights import base_name, model_files, named_weights
from deltawire.sync.options import KEEP_VERSIONS, PublishOptions
from deltawire.sync.published import WholeBits
from deltawire.sync.publisher import Publisher
from deltawire.sync.sharded import open_sharded


def publish(
    model: torch.nn.Module,
    *,
    store: str | Store,
    run_id: str = "",
    tokenizer: object = None,
    dtype: torch.dtype = torch.bfloat16,
    encoding: Encoding = "auto",
    anchor_every: int | None = None,
    keep_versions: int = KEEP_VERSIONS,
    skip_levels: Sequence[int] = (),
    owner_file: Path | None = None,
    take_over: bool = False,
    token: SecretStr | None = None,
) -> LoopPublisher:
    """Found a run for `model`, or go on with one, and publish its weights step by step.

    Plain, Accelerate-wrapped, compiled and DDP models; FSDP2 models shard by shard (call it, and
    every method of what it returns, on all ranks). fp32 parameters are published as `dtype`, others
    as they are. With transformers models configuration and `tokenizer` go along, so that a replica
    needs the bucket only. `owner_file` (beside your checkpoints) lets a restarted trainer go on.
    """
    opened = open_store(store, token=token) if isinstance(store, str) else store
    named = named_weights(model)
    sharded = any(isinstance(tensor, DTensor) for _, tensor in named)
    if not sharded and dist.is_initialized() and dist.get_rank() > 0:
        return SilentRank()
    options = PublishOptions(
        encoding=encoding,
        anchor_every=anchor_every,
        keep_versions=keep_versions,
        skip_levels=tuple(skip_levels),
    )
    with model_files(model, tokenizer) as files:
        enter = partial(
            enter_run,
            opened,
            run_id=run_id,
            base_model=base_name(model),
            model_files=files,
            options=options,
            owner_file=owner_file,
            take_over=take_over,
        )
        if sharded:
            return open_sharded(
                model, store=opened, master_dtype=word_of(dtype), options=options, enter=enter
            )
        layout, tied = Layout.of_tensors(named, master_dtype=word_of(dtype))
        entered = enter(WholeBits.holding(named, layout), tied)
    return ModelPublisher(model, Publisher.of_entered(opened, entered, options=options))


def follow(
    store: str | Store,
    *,
    run_id: str = "",
    cache_dir: Path | None = None,
    token: SecretStr | None = None,
) -> ModelFollower:
    """Follow a run from anywhere that reaches the bucket. Reads only.

    Downloads are kept in `cache_dir`, by default a temporary folder of this follower.
    """
    opened = open_store(store, token=token) if isinstance(store, str) else store
    if cache_dir is not None:
        return ModelFollower(Follower(opened, run_id, cache_dir))
    scratch = Path(tempfile.mkdtemp(prefix="deltawire-follow-"))
    return ModelFollower(Follower(opened, run_id, scratch), scratch=scratch)
