"""Samples text from the demo's model (`make demo`), a token of every request at a time.

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
from jax_dsa.training.data import BOS, RunError, load_corpus
from jax_dsa.training.report import text


def main(argv=None):
    parser = _parser()
    args = parser.parse_args(argv)
    config = PRESETS[args.preset]()
    folder = args.run_dir or Path("runs") / args.preset
    try:
        if args.random:
            model = DecoderLM(config.model, rngs=nnx.Rngs(args.seed))
        else:
            model = trained(config, folder)
        prompt = prompts(args, config, folder)
        cache = model.init_cache(
            args.batch, prompt.shape[1] + args.tokens, fp8=args.fp8, page_size=args.page_size
        )
    except ValueError as error:
        parser.error(str(error))
    sampler = Sampler(model, temperature=args.temperature)
    written, rate = sample(sampler, prompt, cache, jax.random.key(args.seed), args.tokens)
    print(f"{text(prompt[0])[-300:]}|{text(written[0])}\n")
    print(
        f"{jax.devices()[0].device_kind}, batch {args.batch}, {prompt.shape[1]} tokens of context, "
        f"{'FP8 records' if args.fp8 else np.dtype(config.model.attention.dtype).name}, "
        f"{f'pages of {args.page_size}' if args.page_size else 'flat'}: "
        f"{rate:,.0f} tokens/s, {1e3 * args.batch / rate:.3f} ms a step"
    )
    return 0


def trained(config, folder):
    """The model of a run's newest checkpoint."""
    checkpoints = Checkpoints(folder / "checkpoints")
    step = checkpoints.latest()
    if step is None:
        raise RunError(f"no checkpoint in {folder}: run `make demo` first, or use --random")
    its, ours = checkpoints.facts(step)["config"], settings(config)
    if any(its.get(name) != ours[name] for name in ours if name.startswith("model.")):
        raise RunError(f"the run in {folder} has another model than --preset says")
    program = Program(config)
    state = checkpoints.restore(step, program.init())
    checkpoints.close()
    return program.model(state.backbone.params, state.indexer.params)


def prompts(args, config, folder):
    """A prompt for each request, [B, P]: the same one, or pieces of the validation text, over and
    over.
    """
    if args.prompt is not None:
        tokens = np.array([BOS, *args.prompt.encode()], np.int32)
        return np.repeat(tokens[None], args.batch, axis=0)
    corpus = load_corpus(args.data, folder)
    length = args.context or config.seq_len // 2
    return np.resize(corpus.validation, (args.batch, length)).astype(np.int32)


def sample(sampler, prompt, cache, key, steps):
    """The tokens [B, steps] after the prompts, and the tokens a second of all requests.

    A token is read while the next step runs. The rate leaves out the prefill and the first step,
    which wait for the compiler.
    """
    batch = len(prompt)
    token, stream = sampler.prefill(prompt, cache, key)
    written = []
    with tqdm(total=batch * steps, unit=" tokens", unit_scale=True, dynamic_ncols=True) as bar:

        def read(token):
            written.append(np.asarray(token))
            bar.update(batch)

        for i in range(1, steps):
            following, stream = sampler.step(token, stream)
            read(token)
            if i == 2:  # the first step is done
                start = time.perf_counter()
            token = following
        read(token)
        seconds = time.perf_counter() - start
    return np.concatenate(written, axis=1), batch * (steps - 2) / seconds


def _number(least):
    def parse(text):
        number = int(text)
        if number < least:
            raise argparse.ArgumentTypeError(f"{text} is less than {least}")
        return number

    return parse


def _parser():
    parser = argparse.ArgumentParser(description="Samples text from the demo's model.")
    parser.add_argument("--preset", choices=list(PRESETS), default="cpu")
    parser.add_argument("--run-dir", type=Path, help="of the demo, default runs/PRESET")
    parser.add_argument("--random", action="store_true", help="random weights: to measure speed")
    parser.add_argument("--prompt", help="default validation text, different for each request")
    parser.add_argument("--data", type=Path, help="folder of text, as the demo's")
    parser.add_argument(
        "--context",
        type=_number(1),
        help="tokens of validation text; by default half of the sequences of training",
    )
    parser.add_argument("--batch", type=_number(1), default=1, help="requests")
    parser.add_argument("--tokens", type=_number(3), default=256, help="of each request, 3 or more")
    parser.add_argument("--page-size", type=_number(1), help="paged cache; default flat")
    parser.add_argument("--fp8", action="store_true", help="a cache of FP8 records")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    sys.exit(main())
