"""Serves requests of different lengths by continuous batching, from a pool of pages.

python examples/serve.py --requests 8 --slots 3 --pages 12

A request gets a slot and pages as soon as both are free, and gives them back at its end, while the
others go on. At the end, the tokens are compared with those of decoding one request at a time.
"""

import argparse
import collections
import dataclasses
import time

import jax
import numpy as np
from flax import nnx

from jax_dsa import nn
from jax_dsa.serving import PageAllocator
from jax_dsa.training import Sampler

ATTENTION = nn.AttentionConfig(
    model_dim=64, num_heads=4, q_rank=None, kv_rank=32, nope_dim=16, rope_dim=16, v_dim=16,
    index_heads=4, index_dim=16, index_rope_dim=8, top_k=16,
)  # fmt: skip
CONFIG = nn.DecoderConfig(ATTENTION, vocab=256, num_layers=2, mlp_dim=128)
PAGE_SIZE = 8
CAPACITY = 64  # tokens that a request may have
PROMPT_SIZES = (8, 24)  # Prompts are padded to one of these, so that there are few programs.


@dataclasses.dataclass
class Request:
    """A prompt, the number of tokens to generate after it, and the generated tokens."""

    prompt: np.ndarray
    steps: int
    tokens: list = dataclasses.field(default_factory=list)

    @property
    def length(self):
        """Number of tokens that the request needs places for."""
        return len(self.prompt) + self.steps


def serve(model, sampler, requests, slots, num_pages):
    """Generates the tokens of all requests, in the order in which they wait.

    Returns:
        The number of decode steps, and the time that they took, in seconds.
    """
    waiting = collections.deque(requests)
    cache = model.init_cache(slots, CAPACITY, page_size=PAGE_SIZE, num_pages=num_pages)
    pages = PageAllocator(num_pages, PAGE_SIZE, slots, -(-CAPACITY // PAGE_SIZE))
    key, stream = jax.random.key(0), None
    active = {}  # the request in each slot that has one
    lengths = np.zeros(slots, np.int32)
    tokens = np.zeros((slots, 1), np.int32)  # the last token of each request
    steps, seconds = 0, 0.0
    while waiting or active:
        begun = begin(waiting, active, pages)
        if begun:
            longest = max(len(active[slot].prompt) for slot in begun)
            size = next(n for n in PROMPT_SIZES if n >= longest)
            prompts, counts = np.zeros((slots, size), np.int32), np.zeros(slots, np.int32)
            for slot in begun:
                prompt = active[slot].prompt
                prompts[slot, : len(prompt)], counts[slot] = prompt, len(prompt)
                lengths[slot] = 0
            # The slots have new requests without tokens, and their pages. The others keep both.
            cache = cache.with_page_table(pages.table).with_lengths(lengths)
            new, stream = sampler.prefill(prompts, cache, key, counts=counts)
        else:
            counts = np.array([slot in active for slot in range(slots)], np.int32)
            start = time.perf_counter()
            new, stream = sampler.step(tokens, stream, counts=counts)
        new = np.asarray(new)
        if not begun:
            steps, seconds = steps + 1, seconds + time.perf_counter() - start
        cache, key = stream
        lengths = lengths + counts
        tokens = np.where(new < 0, tokens, new)  # -1: the request had no token in this call.
        for slot in np.flatnonzero(counts).tolist():
            active[slot].tokens.append(int(new[slot, 0]))
            if len(active[slot].tokens) == active[slot].steps:
                pages.free(slot)  # The request has ended.
                del active[slot]
    return steps, seconds


def begin(waiting, active, pages):
    """Moves waiting requests to free slots while there are pages for them; returns these slots."""
    begun = []
    for slot in range(pages.slots):
        if waiting and slot not in active and pages.fits(slot, waiting[0].length):
            active[slot] = waiting.popleft()
            pages.reserve(slot, active[slot].length)
            begun.append(slot)
    return begun


def one_by_one(model, requests):
    """Returns each request's tokens, decoded alone, one token at a time, in a flat cache."""
    sampler, found = Sampler(model, temperature=0), []
    for request in requests:
        text = [*request.prompt]
        cache, key = model.init_cache(1, CAPACITY), jax.random.key(0)
        token, stream = sampler.prefill(np.array([text[:1]], np.int32), cache, key)
        for i in range(1, request.length):
            if i == len(text):
                text.append(int(token[0, 0]))
            token, stream = sampler.step(np.array([text[i : i + 1]], np.int32), stream)
        found.append(text[len(request.prompt) :])
    return found


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--slots", type=int, default=3)
    parser.add_argument(
        "--pages", type=int, default=12, help=f"pages of {PAGE_SIZE} tokens in the pool"
    )
    args = parser.parse_args(argv)
    model = nn.DecoderLM(CONFIG, rngs=nnx.Rngs(0))
    sampler = Sampler(model, temperature=0)
    rng = np.random.default_rng(0)
    requests = [
        Request(rng.integers(0, CONFIG.vocab, rng.integers(1, 24)), int(rng.integers(4, 32)))
        for _ in range(args.requests)
    ]
    longest = max(request.length for request in requests)
    if args.slots < 1 or args.pages * PAGE_SIZE < longest:
        parser.error(
            f"a request has {longest} tokens: want 1 slot and {-(-longest // PAGE_SIZE)} pages"
        )
    # The first run compiles the programs.
    serve(
        model,
        sampler,
        [dataclasses.replace(r, tokens=[]) for r in requests],
        args.slots,
        args.pages,
    )
    steps, seconds = serve(model, sampler, requests, args.slots, args.pages)
    for i, request in enumerate(requests):
        print(f"request {i}: a prompt of {len(request.prompt)} tokens, then {request.tokens}")
    generated = sum(len(request.tokens) for request in requests) - len(requests)
    rate = generated / seconds
    print(
        f"{len(requests)} requests in {args.slots} slots, {args.pages} pages of {PAGE_SIZE} tokens "
        f"for {args.slots * CAPACITY} places: {steps} steps, {rate:,.0f} tokens/s"
    )
    assert [request.tokens for request in requests] == one_by_one(model, requests)
    print("The tokens equal those of decoding one request at a time.")
    return requests


if __name__ == "__main__":
    main()
