"""A short training run in one process or in two; see test_training_resume.py."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib

import jax


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--mesh", type=json.loads, default={"data": 1})
    parser.add_argument("--attention", default="keys")
    parser.add_argument("--address")
    parser.add_argument("--process", type=int)
    args = parser.parse_args()
    jax.config.update("jax_disable_most_optimizations", True)
    if args.address:
        # Programs that are dispatched asynchronously may run in different orders in the two
        # processes. Their collectives would then wait for each other.
        jax.config.update("jax_cpu_enable_async_dispatch", False)
        jax.distributed.initialize(args.address, num_processes=2, process_id=args.process)

    from jax_dsa.training.mesh import make_mesh
    from jax_dsa.training.trainer import Trainer
    from support.training import ATTENTIONS, MESH_CONFIG, corpus

    model = dataclasses.replace(MESH_CONFIG.model, attention=ATTENTIONS[args.attention])
    config = dataclasses.replace(MESH_CONFIG, model=model, checkpoint_every=2, log_every=1)
    trainer = Trainer(config, corpus(), args.folder, make_mesh(args.mesh))
    assert trainer.run()
    print("finished")


if __name__ == "__main__":
    main()
