"""Generates text with the demo's model (`make demo`), one token of every request at a time.

python examples/generate.py --prompt "import jax"
python examples/generate.py --preset h200 --random --batch 64 --context 8192 --fp8 --page-size 64
"""

import argparse
import sys
import time
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from tqdm import tqdm

from jax_dsa.nn import DecoderLM
from jax_dsa.training import PRESETS, Program, Sampler
from jax_dsa.training.checkpoint import Checkpoints
from jax_dsa.training.config import settings
from jax_dsa.training.data import BOS, RunError, load_corpus, to_text


def main(argv=None):
    parser = _parser()
    args = parser.parse_args(argv)
    config = PRESETS[args.preset]()
    folder = args.run_dir or Path("runs") / args.preset
    try:
        if args.random:
            model = DecoderLM(config.model, rngs=nnx.Rngs(args.seed))
        else:
            model = trained_model(config, folder)
        prompt = prompts(args, config, folder)
        cache = model.init_cache(
            args.batch, prompt.shape[1] + args.tokens, fp8=args.fp8, page_size=args.page_size
        )
        sampler = Sampler(model, temperature=args.temperature)
    except ValueError as error:
        parser.error(str(error))
    generated, rate = sample(sampler, prompt, cache, jax.random.key(args.seed), args.tokens)
    print(f"{to_text(prompt[0])[-300:]}|{to_text(generated[0])}\n")
    print(
        f"{jax.devices()[0].device_kind}, batch {args.batch}, {prompt.shape[1]} tokens of context, "
        f"{'FP8 records' if args.fp8 else np.dtype(config.model.attention.dtype).name}, "
        f"{f'pages of {args.page_size}' if args.page_size else 'flat'}: "
        f"{rate:,.0f} tokens/s, {1e3 * args.batch / rate:.3f} ms per step"
    )
    return 0


def trained_model(config, folder):
    """Returns the model of a run's newest checkpoint."""
    checkpoints = Checkpoints(folder / "checkpoints")
    step = checkpoints.latest()
    if step is None:
        raise RunError(f"no checkpoint in {folder}: run `make demo` first, or use --random")
    stored, expected = checkpoints.facts(step)["config"], settings(config)
    if any(stored.get(n) != expected[n] for n in expected if n.startswith("model.")):
        raise RunError(f"the run in {folder} has another model than the preset of --preset")
    program = Program(config)
    state = checkpoints.restore(step, program.init())
    checkpoints.close()
    return program.model(state.backbone.params, state.indexer.params)


def prompts(args, config, folder):
    """Returns a prompt for each request, [B, P].

    With --prompt all requests have the same prompt. Otherwise they have consecutive pieces of the
    validation text, which is repeated if it is too short.
    """
    if args.prompt is not None:
        tokens = np.array([BOS, *args.prompt.encode()], np.int32)
        return np.repeat(tokens[None], args.batch, axis=0)
    corpus = load_corpus(args.data, folder)
    length = args.context or config.seq_len // 2
    return np.resize(corpus.validation, (args.batch, length)).astype(np.int32)


def sample(sampler, prompt, cache, key, steps):
    """Generates the tokens after the prompts.

    A token is read while the next step runs.

    Returns:
        The tokens, [B, steps], and the tokens per second of all requests together. The rate leaves
        out the prefill and the first step, because they wait for the compiler.
    """
    batch = len(prompt)
    token, stream = sampler.prefill(prompt, cache, key)
    generated = []
    with tqdm(total=batch * steps, unit=" tokens", unit_scale=True, dynamic_ncols=True) as bar:

        def read(token):
            generated.append(np.asarray(token))
            bar.update(batch)

        for i in range(1, steps):
            following, stream = sampler.step(token, stream)
            read(token)
            if i == 2:  # The first step has finished.
                start = time.perf_counter()
            token = following
        read(token)
        seconds = time.perf_counter() - start
    return np.concatenate(generated, axis=1), batch * (steps - 2) / seconds


def _at_least(least):
    """Returns a parser of integers that are not smaller than `least`."""

    def parse(text):
        number = int(text)
        if number < least:
            raise argparse.ArgumentTypeError(f"{text} is less than {least}")
        return number

    return parse


def _parser():
    parser = argparse.ArgumentParser(description="Generates text with the demo's model.")
    parser.add_argument("--preset", choices=list(PRESETS), default="cpu")
    parser.add_argument("--run-dir", type=Path, help="the demo's folder (default: runs/PRESET)")
    parser.add_argument("--random", action="store_true", help="use random weights, to time them")
    parser.add_argument(
        "--prompt", help="prompt of all requests (default: a piece of validation text for each)"
    )
    parser.add_argument("--data", type=Path, help="folder of text, as in the demo")
    parser.add_argument(
        "--context",
        type=_at_least(1),
        help="tokens of validation text (default: half of a training sequence)",
    )
    parser.add_argument("--batch", type=_at_least(1), default=1, help="number of requests")
    parser.add_argument(
        "--tokens", type=_at_least(3), default=256, help="tokens to generate per request, 3 or more"
    )
    parser.add_argument(
        "--page-size", type=_at_least(1), help="tokens per page (default: a flat cache)"
    )
    parser.add_argument("--fp8", action="store_true", help="store FP8 records in the cache")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 or larger")
    parser.add_argument("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    sys.exit(main())
