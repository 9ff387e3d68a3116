"""Generates answers with vLLM: a script for the Python of vLLM's own environment. Imports no package but vllm.

Run as `python -P vllm_script.py REQUEST.json RESULT.json`, with a pipe as standard input that nothing is written to.
The system closes the pipe when the process at its other end closes it or ends, however that happens. A shell then ends
this process group; a thread of this process could not do so while C code holds the GIL.

The request holds `prompts` (lists of token ids), `llm` (arguments of vllm.LLM), `sampling` (of vllm.SamplingParams) and
`adapter` (the folder of a LoRA adapter, or null). The result holds `answers` (lists of token ids, in the order of the
prompts) and `seconds` (the time that generating took, without loading).
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

END_GROUP = """
cat > /dev/null
kill -s TERM -- -$1 2> /dev/null
for tenth in $(seq 50); do kill -s 0 -- -$1 2> /dev/null || exit 0; sleep 0.1; done
kill -s KILL -- -$1
"""
"""Shell script: once standard input is closed, the process group has five seconds to clean up before it is killed."""


def main(request_file: str, result_file: str) -> None:
    """Load the model, answer all prompts, and write the result file."""
    subprocess.Popen(["sh", "-c", END_GROUP, "sh", str(os.getpgid(0))], start_new_session=True)
    request = json.loads(Path(request_file).read_text(encoding="utf-8"))

    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.lora.request import LoRARequest

    llm = LLM(**request["llm"])
    adapter = LoRARequest("adapter", 1, request["adapter"]) if request["adapter"] else None
    prompts = [TokensPrompt(prompt_token_ids=ids) for ids in request["prompts"]]
    started = time.perf_counter()
    outputs = llm.generate(prompts, SamplingParams(**request["sampling"]), lora_request=adapter)
    result = {
        "seconds": time.perf_counter() - started,
        "answers": [list(output.outputs[0].token_ids) for output in outputs],
    }
    Path(result_file).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":  # vLLM's workers import this file
    main(*sys.argv[1:])
