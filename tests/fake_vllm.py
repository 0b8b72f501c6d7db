"""A server with the protocol of vLLM over a tiny model, for tests: completions, adapters, new weights, a prefix cache.

Its answers are those of the weights that it holds, so an engine that sends the wrong ones, or finds something stale,
disagrees with it as it would with vLLM. As a process of its own: `python tests/fake_vllm.py FOLDER PORT`.

>>> from fake_vllm import FakeVllm, running
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from completions_server import Http
from routed import as_vllm, by_token, chosen

# path and body -> a status, "drop" the connection, "mute": do it and drop the connection, or go on
Hook = Callable[[str, dict[str, Any]], int | str | None]


class FakeVllm:
    """`stale`: its cache is never reset. `busy`: it says that it was not. `away`: it answers no GET. `raw`:
    log-probabilities are those before the temperature. `routed`: it says which experts computed the tokens. `asked` are
    all requests by path. Whole weights reach everything but a tied head, unless the file names it."""

    def __init__(
        self, model: PreTrainedModel, *, boot: str = "1", max_context: int = 4096, tokenizer: Any = None
    ) -> None:
        self.model, self.boot, self.max_context, self.tokenizer = model, boot, max_context, tokenizer
        self.stale = self.raw = self.routed = self.busy = self.away = False
        self.dev, self.lora = True, True
        self.hook: Hook = lambda path, body: None
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.adapters: dict[str, Path] = {}
        self._head = model.get_output_embeddings().weight.detach().clone()
        self._kept: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}  # logits behind a prompt, as if from a cache
        self._lock = threading.Lock()

    def start_with(self, weights: dict[str, torch.Tensor]) -> None:
        """Its weights, and nothing computed, as if it had been started with them."""
        self.model.load_state_dict(weights)
        self._head = self.model.get_output_embeddings().weight.detach().clone()
        self._kept.clear()

    def of(self, path: str) -> list[dict[str, Any]]:
        """The bodies of the requests to a path."""
        return [body for one, body in self.asked if one == path]

    def get(self, path: str) -> tuple[int, Any]:
        if path == "/v1/models":
            row = {"id": "policy", "parent": None, "max_model_len": self.max_context}
            return 200, {"data": [row, *({"id": name, "parent": "policy"} for name in self.adapters)]}
        return (200, {}) if path == "/health" else (404, {})

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        with self._lock:
            if path == "/v1/completions":
                return self._complete(body)
            if path == "/v1/load_lora_adapter" and self.lora:
                if body["lora_name"] in self.adapters:
                    return 400, {"error": {"message": "has already been loaded"}}
                if not Path(body["lora_path"]).is_dir():
                    return 400, {"error": {"message": f"No adapter found for {body['lora_path']}"}}
                self.adapters[body["lora_name"]] = Path(body["lora_path"])
                return 200, "loaded"
            if path == "/v1/unload_lora_adapter" and self.lora:
                return (200, "gone") if self.adapters.pop(body["lora_name"], None) else (404, {})
            if path == "/collective_rpc" and self.dev:
                return self._reload(Path(body["kwargs"]["weights_path"]))
            if path == "/reset_prefix_cache" and self.dev:
                if not self.stale:
                    self._kept.clear()
                return 200, {"success": not self.busy}
        return 404, {"error": {"message": "not found"}}

    def _reload(self, folder: Path) -> tuple[int, Any]:
        if not folder.is_dir():
            return 500, {"error": {"message": f"no folder {folder}"}}
        tensors = {
            name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()
        }
        if "lm_head.weight" in tensors:  # vLLM on a CPU holds a packed copy of the head, tied or not
            self._head = tensors["lm_head.weight"].clone()
        self.model.load_state_dict(tensors, strict=False)
        return 200, {"results": [None]}

    def _complete(self, body: dict[str, Any]) -> tuple[int, Any]:
        if body["model"] != "policy" and body["model"] not in self.adapters:
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist."}}
        if isinstance(body["prompt"], str):
            body["prompt"] = self.tokenizer.encode(body["prompt"], add_special_tokens=body["add_special_tokens"])
        if len(body["prompt"]) + body["max_tokens"] > self.max_context:
            return 400, {"error": {"message": "This model's maximum context length is exceeded."}}
        if "prompt_logprobs" in body:
            return 200, {"choices": [self._score(body)]}
        with chosen(self.model) as found:
            ids, logprobs, tops = self._sample(body)
        stop = ids[-1] in body.get("stop_token_ids", ())
        names = [f"token_id:{token}" for token in ids]
        reported = {"tokens": names, "token_logprobs": logprobs, "top_logprobs": tops}
        choice = {"index": 0, "text": "", "logprobs": reported, "finish_reason": "stop" if stop else "length"}
        if self.routed:
            choice["routed_experts"] = as_vllm(by_token(self.model, found))
        usage = {"prompt_tokens_details": {"cached_tokens": 0}}
        return 200, {"choices": [choice], "usage": usage, "system_fingerprint": self.boot}

    @torch.inference_mode()
    def _score(self, body: dict[str, Any]) -> dict[str, Any]:
        """Every token of the prompt, as vLLM says it: by id, the first has none."""
        prompt = body["prompt"]
        logprobs = self.model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        told = [{str(t): {"logprob": float(logprobs[i, t]), "rank": 1}} for i, t in enumerate(prompt[1:])]
        known = {"prompt_token_ids": prompt} if body.get("return_token_ids") else {}
        return {"index": 0, "text": "", "finish_reason": "length", "prompt_logprobs": [None, *told], **known}

    @torch.inference_mode()
    def _sample(self, body: dict[str, Any]) -> tuple[list[int], list[float], list[dict[str, float]]]:
        generator = torch.Generator().manual_seed(body["seed"])
        cool = body["temperature"] or 1.0
        key = body["model"], tuple(body["prompt"])
        ids: list[int] = []
        logprobs: list[float] = []
        tops: list[dict[str, float]] = []
        with self._adapted(body["model"]) as model:
            cache, block = None, torch.tensor([body["prompt"]])
            while len(ids) < body["max_tokens"] and not (ids and ids[-1] in body.get("stop_token_ids", ())):
                found = model.base_model(input_ids=block, past_key_values=cache, use_cache=True)
                cache, logits = found.past_key_values, found.last_hidden_state[0, -1] @ self._head.T
                if not ids:  # what was computed behind this prompt before is taken as it is
                    logits = self._kept.setdefault(key, logits)
                scaled = (logits / cool).log_softmax(-1)
                token = (
                    int(scaled.exp().multinomial(1, generator=generator))
                    if body["temperature"]
                    else int(scaled.argmax())
                )
                shown = logits.log_softmax(-1) if self.raw else scaled
                best = shown.topk(body["logprobs"])
                ids.append(token)
                logprobs.append(float(shown[token]))
                tops.append({f"token_id:{i}": float(x) for x, i in zip(best.values, best.indices, strict=True)})
                block = torch.tensor([[token]])
        return ids, logprobs, tops

    @contextlib.contextmanager
    def _adapted(self, name: str) -> Iterator[PreTrainedModel]:
        """The model with an adapter, for a while."""
        if name == "policy":
            yield self.model
            return
        self.model.load_adapter(str(self.adapters[name]), adapter_name="served")
        try:
            yield self.model
        finally:
            self.model.delete_adapter("served")


@contextlib.contextmanager
def running(fake: FakeVllm, port: int = 0) -> Iterator[str]:
    """Serve it while the block lasts; its URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if fake.away:
                self.close_connection = True
                return
            self._answer(*fake.get(self.path))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
            fake.asked.append((self.path, body))
            said = fake.hook(self.path, body)
            if said in ("drop", "mute"):
                if said == "mute":
                    fake.post(self.path, body)
                self.close_connection = True
                return
            self._answer(*(fake.post(self.path, body) if said is None else (int(said), {"error": {"message": "no"}})))

        def _answer(self, status: int, value: Any) -> None:
            text = (value if isinstance(value, str) else json.dumps(value)).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            return None

    http = Http(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_address[1]}"
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


if __name__ == "__main__":
    import uuid

    from turntree.engine.checkpoint import load_model

    with running(FakeVllm(load_model(sys.argv[1]), boot=uuid.uuid4().hex), int(sys.argv[2])):
        threading.Event().wait()
