"""A small HTTP server that answers like SGLang's `/generate` does where nothing is to be generated."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


@contextlib.contextmanager
def teacher_server(directory: Path, tokenizer: Any = None) -> Iterator[str]:
    """Serves a Hugging Face directory; yields the address of `/generate`."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = tokenizer or AutoTokenizer.from_pretrained(directory)

    @torch.no_grad()
    def answer(request: dict[str, Any]) -> dict[str, Any]:
        assert request["sampling_params"]["max_new_tokens"] == 0
        assert request["return_logprob"]
        ids, start = request["input_ids"], request["logprob_start_len"]
        log_probs = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        places = range(start, len(ids))

        def triples(position: int, tokens: list[int]) -> list[list[Any]] | None:
            """[log-prob, id, text] of tokens at a position; nothing where there is no context."""
            if position == start:
                return None
            texts = [tokenizer.decode([token]) if request.get("return_text_in_logprobs") else None for token in tokens]
            values = log_probs[position - 1, tokens].tolist()
            return [list(entry) for entry in zip(values, tokens, texts, strict=True)]

        meta: dict[str, Any] = {
            "input_token_logprobs": [(triples(p, [ids[p]]) or [[None, ids[p], None]])[0] for p in places]
        }
        if request.get("top_logprobs_num"):
            k = request["top_logprobs_num"]
            meta["input_top_logprobs"] = [triples(p, log_probs[p - 1].topk(k).indices.tolist()) for p in places]
        if request.get("token_ids_logprob"):
            meta["input_token_ids_logprobs"] = [triples(p, request["token_ids_logprob"]) for p in places]
        return {"text": "", "meta_info": meta}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            data = json.dumps(answer(body)).encode()
            self.send_response(200 if self.path == "/generate" else 404)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: Any) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/generate"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
