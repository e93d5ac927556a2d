"""A short training run in a process of its own, or one of two; see test_training_resume.py."""

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
    parser.add_argument("--address")
    parser.add_argument("--process", type=int)
    args = parser.parse_args()
    jax.config.update("jax_disable_most_optimizations", True)
    if args.address:
        # Programs that run side by side meet in any order, and so would their collectives.
        jax.config.update("jax_cpu_enable_async_dispatch", False)
        jax.distributed.initialize(args.address, num_processes=2, process_id=args.process)

    from jax_dsa.training.mesh import make_mesh
    from jax_dsa.training.trainer import Trainer
    from support.training import MESH_CONFIG, corpus

    config = dataclasses.replace(MESH_CONFIG, checkpoint_every=2, log_every=1)
    trainer = Trainer(config, corpus(), args.folder, make_mesh(args.mesh))
    assert trainer.run()
    print("finished")


if __name__ == "__main__":
    main()
