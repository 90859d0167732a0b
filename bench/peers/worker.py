"""One peer engine with one context, driven by JSON lines; runs in the peer's own environment.

    python bench/peers/worker.py {llamacpp,transformers} MODEL.gguf [--threads 2]

Each line on stdin is a command, each line on stdout its reply; the first reply says that the model
is loaded. Times are taken here, around the engine's own call, so that pipes and JSON cost nothing.

    {"do": "append", "ids": [...]}        more context; nothing is computed
    {"do": "warm"}                        a request for 1 token, so that the cache holds the context
    {"do": "ask", "ids": [...], "max_new_tokens": 4, "reuse": true}
    {"do": "clear"}                       forget context and cache
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
import time

CONTEXT_TOKENS = 8192
BATCH_TOKENS = 512


class LlamaCpp:
    """llama-cpp-python, which reuses the longest cached prefix of a request by itself."""

    def __init__(self, path: str, threads: int):
        """Load a GGUF file."""
        import llama_cpp
        from llama_cpp import llama as high
        from llama_cpp import llama_cpp as low

        default = low.llama_model_default_params

        def params():
            chosen = default()
            chosen.use_extra_bufts = False  # its AMX path faults on some virtual CPUs
            return chosen

        low.llama_model_default_params = params
        high.llama_cpp.llama_model_default_params = params
        self.version = f"llama-cpp-python {llama_cpp.__version__}"
        self._engine = llama_cpp.Llama(
            path, n_ctx=CONTEXT_TOKENS, n_batch=BATCH_TOKENS, n_threads=threads,
            n_threads_batch=threads, verbose=False,
        )
        self.cached: list[int] = []

    def tokens(self, ids: list[int]):
        """Yield greedy tokens after `ids`."""
        return self._engine.generate(ids, temp=0.0, top_k=1, reset=True)

    def clear(self) -> None:
        """Forget everything computed."""
        self._engine.reset()
        self.cached = []


class Transformers:
    """transformers with past_key_values kept by hand and cut back to the common prefix."""

    def __init__(self, path: str, threads: int):
        """Load a GGUF file."""
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        import torch
        import transformers

        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()
        torch.set_num_threads(threads)
        file = pathlib.Path(path)
        self.version = f"transformers {transformers.__version__}, torch {torch.__version__}"
        self._torch = torch
        self._new_cache = transformers.DynamicCache
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32
        ).eval()
        self.clear()

    def tokens(self, ids: list[int]):
        """Yield greedy tokens after `ids`."""
        torch = self._torch
        keep = min(_common_len(self.cached, ids), len(ids) - 1)
        if len(self.cached) > keep:
            self._cache.crop(keep - len(self.cached))
        step = ids[keep:]
        while True:
            with torch.inference_mode():
                output = self._model(
                    torch.tensor([step]), past_key_values=self._cache, use_cache=True,
                    logits_to_keep=1,
                )
                token = int(output.logits[0, -1].argmax())
            yield token
            step = [token]

    def clear(self) -> None:
        """Forget everything computed."""
        self._cache = self._new_cache()
        self.cached: list[int] = []


def _common_len(left: list[int], right: list[int]) -> int:
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        count += 1
    return count


def ask(engine, ids: list[int], max_new_tokens: int) -> dict:
    """Answer a request and time it; the engine forwards what its cache lacks."""
    reused = min(_common_len(engine.cached, ids), len(ids) - 1)
    first_ms = None
    answer: list[int] = []
    began = time.perf_counter()
    for token in engine.tokens(ids):
        answer.append(token)
        if first_ms is None:
            first_ms = (time.perf_counter() - began) * 1e3
        if len(answer) == max_new_tokens:
            break
    total_ms = (time.perf_counter() - began) * 1e3
    engine.cached = [*ids, *answer[:-1]]  # the last token drawn was not forwarded
    return {
        "first_token_ms": first_ms, "total_ms": total_ms, "answer_ids": answer,
        "tokens_forwarded": len(ids) - reused + len(answer) - 1,
    }


def serve(engine, commands, replies) -> None:
    """Carry out commands until the input ends."""
    context: list[int] = []
    for line in commands:
        command = json.loads(line)
        reply: dict = {}
        if command["do"] == "append":
            context += command["ids"]
        elif command["do"] == "warm":
            reply = ask(engine, context, 1)
        elif command["do"] == "ask":
            if not command["reuse"]:
                engine.clear()
            reply = ask(engine, context + command["ids"], command["max_new_tokens"])
        elif command["do"] == "clear":
            context = []
            engine.clear()
        else:
            raise ValueError(f"do: expected append, warm, ask or clear, got {command['do']!r}")
        print(json.dumps(reply), file=replies, flush=True)


def main() -> None:
    """Load the engine and serve; whatever libraries print goes to stderr."""
    parser = argparse.ArgumentParser(description="Serve one peer engine over JSON lines.")
    parser.add_argument("engine", choices=("llamacpp", "transformers"))
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    made = {"llamacpp": LlamaCpp, "transformers": Transformers}[args.engine]
    engine = made(args.model, args.threads)
    print(json.dumps({"ready": engine.version}), file=replies, flush=True)
    serve(engine, sys.stdin, replies)


if __name__ == "__main__":
    main()
