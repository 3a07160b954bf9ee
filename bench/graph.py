"""
What Python takes to build the graph of a decode step, beside mlx_lm: `uv run python -m bench.graph`.

Both models have Qwen3-0.6B's shape, 64 rows and adapters of rank 16 on every projection. Nothing is computed: weights
are views of one number, and what only a GPU can run, a kernel or a function of `mx.fast`, is a view of its first input.
"""

import contextlib
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx
from mlx.utils import tree_flatten

import gwen
import lora
import sampler
from bench import launches
from kv_cache import KVCache, SlotCache
from machine import gpu

ROWS, GROUP, RANK, PROMPT, WIDTH, DONE = 64, 8, 16, 128, 256, 100  # DONE of a completion's WIDTH tokens are written
CONFIG = gwen.random_config("random:0.6b")
Step = Callable[[], mx.array]


def alike(x: mx.array, *_: Any, **__: Any) -> mx.array:
    return launches.view(x, x.shape, x.dtype)


@contextlib.contextmanager
def hollow() -> Iterator[None]:
    """Inside, graphs are built as on a GPU and cannot be computed."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(launches.as_on_a_gpu())
        for name in ("rms_norm", "rope", "scaled_dot_product_attention"):
            stack.enter_context(mock.patch.object(mx.fast, name, alike))
        stack.enter_context(mock.patch.object(mx.fast, "metal_kernel", launches.hollow_kernel))
        yield


def empty(model: Any) -> Any:
    """The model in float16, its weights views of one number."""
    number = mx.zeros((1,), mx.float16)
    weights = [(name, launches.view(number, x.shape, mx.float16)) for name, x in tree_flatten(model.parameters())]
    mx.eval(weights)
    model.load_weights(weights)
    return model


def ours() -> Step:
    """A step as `sampler.decode` makes it, prompts shared."""
    model, num_layers, num_prompts = gwen.Model(CONFIG), CONFIG.num_hidden_layers, ROWS // GROUP
    lora.apply(model, RANK, 2.0)
    empty(model)
    mx.eval([layer.rounded(mx.float16) for _, layer in lora.layers(model)])
    prompts = KVCache(num_layers, PROMPT)
    for layer in prompts.layers:
        layer.length = PROMPT
        shape = (num_prompts, CONFIG.num_key_value_heads, PROMPT, CONFIG.head_dim)
        layer.keys = layer.values = mx.zeros(shape, mx.float16)
    cache = SlotCache(prompts, ROWS, WIDTH)
    cache.advance(DONE)
    cache.assign([row // GROUP for row in range(ROWS)], [0] * ROWS)
    params, logits, numbers = sampler.SamplingParams(), mx.zeros((ROWS, CONFIG.vocab_size)), mx.zeros((ROWS, 4))
    forward = gwen.decode_step(model)

    def step() -> mx.array:
        with gpu.without_gradients():
            tokens = sampler.choose_token(logits, numbers, params)[0]
            return forward(tokens[:, None], cache)[:, -1] @ model.head_weight.T

    return step


def of_mlx_lm() -> Step:
    """A step of its model and cache, with a token drawn and its log-probabilities."""
    from mlx_lm.models import cache, qwen3
    from mlx_lm.tuner.utils import linear_to_lora_layers

    model: Any = qwen3.Model(qwen3.ModelArgs.from_dict(CONFIG.raw))
    linear_to_lora_layers(model, CONFIG.num_hidden_layers, {"rank": RANK, "scale": 2.0, "dropout": 0.0})
    empty(model).eval()
    held = [cache.KVCache() for _ in model.layers]
    for layer in held:
        shape = (ROWS, CONFIG.num_key_value_heads, PROMPT + WIDTH, CONFIG.head_dim)
        layer.keys = layer.values = mx.zeros(shape, mx.float16)
        layer.offset = PROMPT + DONE
    logits = mx.zeros((ROWS, CONFIG.vocab_size))

    def step() -> mx.array:
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        result: mx.array = model(mx.random.categorical(logprobs)[:, None], cache=held)[:, -1]
        return result

    return step


def num_calls(step: Step) -> int:
    """Calls that Python makes in one step, of its own functions and of MLX's."""
    found = [0]

    def note(_: Any, event: str, __: Any) -> None:
        found[0] += event in ("call", "c_call")

    sys.setprofile(note)
    step()
    sys.setprofile(None)
    return found[0]


def milliseconds(step: Step, runs: int = 30) -> float:
    """Of this processor, the least of some steps."""
    marks = [time.process_time()]
    for _ in range(runs):
        step()
        marks.append(time.process_time())
    return min(end - begin for begin, end in itertools.pairwise(marks)) * 1e3


def main() -> None:
    with hollow():
        for name, make in (("ours", ours), ("mlx_lm", of_mlx_lm)):
            step = make()
            step()  # the first one compiles
            print(f"{name:<8} | {milliseconds(step):6.2f} ms a step | {num_calls(step):6} calls")


if __name__ == "__main__":
    main()
