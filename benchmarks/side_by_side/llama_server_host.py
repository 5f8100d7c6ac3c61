"""Runs llama.cpp's server in this process: python llama_server_host.py MODEL CONTEXT_TOKENS SLOTS

For the peer's own environment, which has xllamacpp and nothing of this project. Says when it is ready, and how, by one
JSON line on stdout. Serves until it is killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys

import xllamacpp  # type: ignore[import-not-found]

RECORDED = ("n_batch", "n_ubatch", "cache_ram_mib", "cache_idle_slots", "slot_prompt_similarity", "n_cache_reuse")


def main() -> None:
    """Serve. What is not set here has the package's default."""
    model, context_tokens, slots = sys.argv[1:]
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.port = 0
    params.n_ctx = int(context_tokens)
    params.n_parallel = int(slots)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(params)  # returns when the model is loaded and the port is open
    settings = {name: getattr(params, name) for name in RECORDED}
    settings["flash_attn"] = params.flash_attn_type.name.removeprefix("LLAMA_FLASH_ATTN_TYPE_").lower()
    line = json.dumps({"address": server.listening_address, "settings": settings})
    os.write(sys.stdout.fileno(), f"\n{line}\n".encode())  # one write: the server's threads log beside it
    signal.pause()


if __name__ == "__main__":
    main()
