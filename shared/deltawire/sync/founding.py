"""How a run begins, and how a trainer that comes back finds what was really published.

Order of founding: the claim (by opening the ledger), model files, anchor 0, run.json, then the
commit of anchor 0. A trainer killed in between leaves a run without a committed version, which its
owner, or a take-over, founds again: what lies there already must be the same.
"""

import logging
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from deltawire.codec.patch import Layout
from deltawire.protocol.adapters import AdapterManifest
from deltawire.protocol.chain import Head, Link, ModelFile, RunManifest
from deltawire.protocol.errors import (
    LayoutMismatch,
    ObjectExists,
    ObjectMissing,
    StoreError,
    WeightsError,
)
from deltawire.protocol.layout import RUN_KEY, in_run, model_file_key
from deltawire.protocol.versions import BASE_VERSION, PolicyVersion
from deltawire.store.base import Store
from deltawire.sync.adapters import base_digest
from deltawire.sync.fence import OwnerFile, new_owner
from deltawire.sync.follower import Follower
from deltawire.sync.heads import as_bytes
from deltawire.sync.ledger import Ledger
from deltawire.sync.options import PublishOptions
from deltawire.sync.published import WholeBits
from deltawire.sync.reader import sha256_of
from deltawire.sync.replay import empty_tensors, replay
from deltawire.sync.scratch import scratch_folder
from deltawire.sync.upload import upload_anchor

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entered:
    """A run that this process may publish to, and what it published last."""

    ledger: Ledger
    bits: WholeBits
    owner_file: OwnerFile | None


def enter_run(
    store: Store,
    bits: WholeBits,
    tied: Mapping[str, str],
    *,
    run_id: str,
    base_model: str,
    model_files: Mapping[str, Path],
    options: PublishOptions,
    owner_file: Path | None,
    take_over: bool,
) -> Entered:
    """Found a run for `bits`, or go on with one whose published bits are then returned.

    Raises Fenced when the run is another trainer's, LayoutMismatch for another model.
    """
    held = OwnerFile(owner_file) if owner_file is not None else None
    with ExitStack() as undo:
        if held is not None:
            undo.callback(held.close)
        check_same_model(store, run_id, bits, adapter=options.adapter)
        owner = held.owner if held is not None else new_owner()
        ledger = Ledger.open(
            store, run_id, owner=owner, take_over=take_over, swap_mode=options.swap_mode
        )
        if ledger.head.links:
            bits = _gone_on(store, ledger, bits, options=options)
        else:
            found_run(
                store,
                ledger,
                bits,
                tied=tied,
                base_model=base_model,
                model_files=model_files,
                options=options,
            )
        undo.pop_all()
    return Entered(ledger=ledger, bits=bits, owner_file=held)


def found_run(
    store: Store,
    ledger: Ledger,
    bits: WholeBits,
    *,
    tied: Mapping[str, str],
    base_model: str,
    model_files: Mapping[str, Path],
    options: PublishOptions,
) -> None:
    """Write everything a replica needs to join, and commit version 0."""
    run_id = ledger.head.run_id
    manifest = RunManifest(
        run_id=run_id,
        base_model=base_model,
        layout_digest=bits.layout.digest,
        tensors=bits.layout.specs,
        tied=dict(tied),
        model_files=[_model_file(name, path) for name, path in sorted(model_files.items())],
        adapter=_on_its_base(options.adapter, bits),
        created_at=time.time(),
    )
    for name, path in model_files.items():
        _put_once(store, in_run(run_id, model_file_key(name)), path)
    anchor = _anchor(store, ledger, bits, version=BASE_VERSION, options=options)
    _put_manifest(store, manifest)
    ledger.write(version=BASE_VERSION, add=[anchor])


def _anchor(
    store: Store,
    ledger: Ledger,
    bits: WholeBits,
    *,
    version: PolicyVersion,
    options: PublishOptions,
) -> Link:
    """An anchor in the store, not linked yet."""
    with scratch_folder() as folder:
        return ledger.under_free_key(
            lambda epoch: upload_anchor(
                store,
                dict(bits.named_bits()),
                layout=bits.layout,
                version=version,
                run_id=ledger.head.run_id,
                digest=bits.digest(),
                epoch=epoch,
                options=options,
                folder=folder,
            )
        )


def check_same_model(
    store: Store, run_id: str, bits: WholeBits, *, adapter: AdapterManifest | None = None
) -> None:
    """Raise LayoutMismatch when the run exists and was founded for other tensors, or for another
    base or scale of an adapter.

    Asked before the run is claimed: a trainer with the wrong model must not fence the right one.
    """
    with scratch_folder() as folder:
        try:
            follower = Follower(store, run_id, folder)
            there, manifest = follower.layout(), follower.manifest()
        except ObjectMissing:
            return
    if there.digest != bits.layout.digest:
        raise LayoutMismatch(
            f"run {run_id!r} was founded for other tensors than this trainer's "
            f"({_first_difference(there, bits.layout)}); choose another run id"
        )
    here = _on_its_base(adapter, bits)
    if _what_it_adds(manifest.adapter) != _what_it_adds(here):
        raise LayoutMismatch(
            f"run {run_id!r} was founded for {_what_it_adds(manifest.adapter)}, this trainer has "
            f"{_what_it_adds(here)}; choose another run id"
        )


def _on_its_base(adapter: AdapterManifest | None, bits: WholeBits) -> AdapterManifest | None:
    if adapter is None:
        return None
    digest = base_digest(dict(bits.named_bits()), bits.layout)
    return adapter.model_copy(update={"base_digest": str(digest)})


def _what_it_adds(adapter: AdapterManifest | None) -> str:
    """What must be the same for an adapter's bits to mean the same."""
    if adapter is None:
        return "no adapter"
    return f"adapters times {adapter.scale:g} on a base of digest {adapter.base_digest}"


def _gone_on(
    store: Store, ledger: Ledger, guess: WholeBits, *, options: PublishOptions
) -> WholeBits:
    """The published bits; where the bucket lost what leads to them, an anchor of `guess` is the
    next version, so that the run and its replicas go on."""
    try:
        return restored_bits(store, ledger.head, guess)
    except (WeightsError, ObjectMissing) as error:
        version = PolicyVersion(ledger.head.version + 1)
        log.warning("chain is broken", extra={"reason": str(error), "anchored_at": version})
    anchor = _anchor(store, ledger, guess, version=version, options=options)
    ledger.write(version=version, add=[anchor])
    return guess


def restored_bits(store: Store, head: Head, guess: WholeBits) -> WholeBits:
    """The published bits of the head: the trainer's own weights if their digest says so, else by
    replaying the chain from the store."""
    if str(guess.digest()) == head.link_digest(head.version):
        return guess
    tensors = empty_tensors(guess.layout)
    with scratch_folder() as folder:
        follower = Follower(store, head.run_id, folder)
        follower.head()
        objects = follower.fetch(follower.route(None, head.version))
        replay(objects, tensors, run_id=head.run_id)
    return WholeBits(guess.layout, dict(tensors.named_bits()))


def _model_file(name: str, path: Path) -> ModelFile:
    model_file_key(name)
    return ModelFile(name=name, sha256=sha256_of(path), bytes=path.stat().st_size)


def _put_once(store: Store, key: str, path: Path) -> None:
    """Upload, or see that the very same file is there already."""
    try:
        store.put(key, path)
    except ObjectExists:
        with scratch_folder() as folder:
            there = folder / "there"
            store.fetch(key, there)
            if sha256_of(there) != sha256_of(path):
                raise StoreError(
                    f"{key} lies in {store.uri} from another model; choose another run id"
                ) from None


def _put_manifest(store: Store, manifest: RunManifest) -> None:
    with scratch_folder() as folder:
        path = folder / RUN_KEY
        path.write_bytes(as_bytes(manifest))
        try:
            store.put(in_run(manifest.run_id, RUN_KEY), path)
        except ObjectExists:
            there = Follower(store, manifest.run_id, folder).manifest()
            if there.model_copy(update={"created_at": manifest.created_at}) != manifest:
                raise LayoutMismatch(
                    f"{RUN_KEY} of run {manifest.run_id!r} was written for another model; choose "
                    "another run id"
                ) from None


def _first_difference(there: Layout, here: Layout) -> str:
    for name in [*there, *here]:
        if name not in there or name not in here:
            return f"{name} is only in {'the run' if name in there else 'this model'}"
        if (there[name].shape, there[name].dtype) != (here[name].shape, here[name].dtype):
            return (
                f"{name} is {there[name].dtype} {there[name].shape} in the run and "
                f"{here[name].dtype} {here[name].shape} here"
            )
    return "their order differs"
