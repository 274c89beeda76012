"""Stock vLLM engines, one after another in one process: what a fresh server says of a checkpoint.

Each line on standard input is `{"checkpoint": folder, "prompts": [[ids], ...], "tokens": n}`; each
answer is a line `{"answers": [[ids, logprobs], ...], "checksums": {name: sha256}}`. Every engine is
built from nothing by vLLM's own loader. Imports are paid once, so one costs two seconds and
not half a minute.
"""

import gc
import json
import os
import sys
from typing import Any

SETTINGS = {
    "dtype": "bfloat16",
    "enforce_eager": True,
    "max_num_seqs": 64,
    "distributed_executor_backend": "uni",
    "logprobs_mode": "processed_logprobs",
    "disable_log_stats": True,
    "skip_tokenizer_init": True,
}
"""As the replica serves (tiny_runs.CPU_ARGUMENTS, engines/vllm/options.py)."""


def ask(checkpoint: str, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    engine = LLM(model=checkpoint, **SETTINGS)
    sampling = SamplingParams(
        temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=0, detokenize=False
    )
    answers = []
    for prompt in prompts:  # one at a time: the same batches as the replica's
        ((said,),) = (
            result.outputs
            for result in engine.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
        )
        logprobs = [
            row[token].logprob for row, token in zip(said.logprobs, said.token_ids, strict=True)
        ]
        answers.append([list(said.token_ids), logprobs])
    (checksums,) = engine.collective_rpc("compute_weight_checksums")
    engine.llm_engine.engine_core.shutdown()
    del engine
    cleanup_dist_env_and_memory()
    return {"answers": answers, "checksums": checksums}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever vLLM prints is no answer
    # vLLM collects garbage nine times for an engine, each time through a million objects of its
    # own modules: what was imported is put aside for good.
    gc.unfreeze = lambda: None
    for line in sys.stdin:
        gc.freeze()
        answers.write(json.dumps(ask(**json.loads(line))) + "\n")
        answers.flush()
    os._exit(0)  # some of vLLM's threads do not end by themselves


if __name__ == "__main__":
    main()
