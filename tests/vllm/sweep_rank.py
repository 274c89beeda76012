"""One tensor parallel rank of the architecture sweep: prints one JSON line per checkpoint.

Each model is built and loaded by vLLM itself, the map is learned and proved, a 5 % delta goes in
place, and the bits of all runtime tensors are compared with vLLM's own loading of the merged
checkpoint. Where vLLM's loading on a live model is known to be wrong (repacked experts) the merged
checkpoint is compared through the map instead, and the wrongness itself is reported.

    sweep_rank.py FOLDER TP RANK INIT_FILE NAME...
"""

import gc
import hashlib
import json
import os
import sys
from pathlib import Path

import torch
from architectures import random_change

from deltawire_inference import vllm_plugin
from deltawire_inference.vllm_plugin.checkpoint_files import read_specs, read_tensors
from deltawire_inference.vllm_plugin.checkpoint_map import UnmappableName
from deltawire_inference.vllm_plugin.live import LiveModel, bits
from deltawire_inference.vllm_plugin.pieces import TablePiece
from deltawire_inference.vllm_plugin.receiver import Receiver
from deltawire_inference.vllm_plugin.trace import learn_map, runtime_tensors
from deltawire_inference.vllm_plugin.verify import differences


def main(folder: Path, tp: int, rank: int, init_file: str, names: list[str]) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        destroy_model_parallel,
        init_distributed_environment,
        initialize_model_parallel,
    )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    torch.accelerator.empty_cache = lambda: None  # as vLLM's CPU worker does
    torch.accelerator.synchronize = lambda *_: None
    vllm_plugin.register()
    torch.set_num_threads(1)
    for i, name in enumerate(names):
        config = EngineArgs(
            model=str(folder / name),
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_model_len=256,
            enforce_eager=True,
            tensor_parallel_size=tp,
        ).create_engine_config()
        config.parallel_config.rank = rank
        with set_current_vllm_config(config):
            if i == 0:
                init_distributed_environment(tp, rank, f"file://{init_file}", rank, "gloo")
            else:
                destroy_model_parallel()
            initialize_model_parallel(tp)
            config.compilation_config.static_forward_context.clear()
            try:
                report = check(get_model(vllm_config=config), folder / name)
            except Exception as error:  # noqa: BLE001  (one model's failure is one row)
                report = {"error": f"{type(error).__name__}: {error}"}
            sys.stdout.write(json.dumps({"name": name, "rank": rank} | report) + "\n")
            sys.stdout.flush()
        gc.collect()


def check(model: torch.nn.Module, path: Path) -> dict[str, object]:
    learned = learn_map(model, read_specs(path))
    unproved = differences(LiveModel(model), learned, read_tensors(path))
    receiver = Receiver(model)
    audit = receiver.learn(path)
    where = receiver.map
    changes, merged = [], {}
    for name, indices, values, tensor in random_change(read_tensors(path), share=0.05, seed=1):
        if name not in where.opaque:
            changes.append((name, indices, values))
            merged[name] = tensor
    before = hash_of(model)
    refused = all(refuses(receiver, name) for name in where.opaque)
    untouched = hash_of(model) == before
    receiver.stage_changes("delta", changes)
    receiver.apply("delta")
    wrong = differences(receiver.live, where, merged.items())
    ours = hash_of(model)
    model.load_weights(iter(merged.items()))
    pieces = [piece for found in where.pieces.values() for piece in found]
    return {
        "names": len(where.specs),
        "pieces": len(pieces),
        "tables": sum(isinstance(piece, TablePiece) for piece in pieces),
        "relayouts": len(where.relayouts),
        "wrong_without_relayouts": len(unproved),
        "wrong": wrong,
        "equals_load_weights": hash_of(model) == ours,
        "opaque": where.opaque,
        "opaque_refused": refused and untouched,
        "ignored": sorted(where.ignored),
        "unwritten": audit.unwritten,
        "derived": [row for row in audit.derived if "kv_cache" not in row],
    }


def refuses(receiver: Receiver, name: str) -> bool:
    value = torch.zeros(1, dtype=receiver.map.specs[name].dtype)
    try:
        receiver.stage_changes("refused", [(name, torch.tensor([0]), value)])
    except UnmappableName:
        return True
    return False


def hash_of(model: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for tensor in runtime_tensors(model).values():
        digest.update(bits(tensor.contiguous()).view(-1).numpy().tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5:])
    os._exit(0)  # gloo's threads do not end by themselves
