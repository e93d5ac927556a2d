"""Measures what delta = sum(out * dout) of a rounded output does to the gradients of queries.

python experiments/rounded_output.py

The kernels recompute delta from the bfloat16 output, as FlashAttention does. The exact value is
sum_s P[s] * dP[s]. In dS = P * (dP - delta), the two terms cancel where one key has nearly all of
the probability, and the error of delta then is large relative to such a row's gradient. The script
computes dQ in float64 with either delta. It uses causal attention with latent keys of DeepSeek-V3.2
(D 576, values 512), normal random numbers, and scores of several standard deviations.
"""

import argparse

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

DIM, VALUE_DIM = 576, 512


def rounded(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns x rounded to bfloat16."""
    return x.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def gradients(
    rng: np.random.Generator, queries: int, heads: int, deviation: float
) -> tuple[NDArray[np.float64], ...]:
    """Returns dQ [T, N, D] with the exact delta, and with delta from the rounded output.

    `deviation` is the standard deviation of the scores.
    """
    q = rounded(rng.normal(size=(queries, heads, DIM)) * deviation)
    k = rounded(rng.normal(size=(queries, DIM)))
    dout = rounded(rng.normal(size=(queries, heads, VALUE_DIM)))
    values = k[:, :VALUE_DIM]
    scores = np.einsum("tnd,sd->tns", q, k) * DIM**-0.5
    position = np.arange(queries)
    scores = np.where(position <= position[:, None, None], scores, -np.inf)
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    out, dp = p @ values, dout @ values.T

    def dq(output: NDArray[np.float64]) -> NDArray[np.float64]:
        delta = np.sum(output * dout, axis=-1, keepdims=True)
        return (p * (dp - delta)) @ k * DIM**-0.5

    return dq(out), dq(rounded(out))


def main(argv: list[str] | None = None) -> dict[float, tuple[float, ...]]:
    """Prints and returns the errors for each standard deviation of the scores.

    The four numbers are the relative error of the whole dQ, the shares of rows (one query, one
    head) whose own relative error is above 1 % and above 10 %, and the share that the latter rows
    have of the norm of dQ.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--queries", type=int, default=256)
    parser.add_argument("--heads", type=int, default=32)
    args = parser.parse_args(argv)
    print("scores' deviation | error of dQ | rows above 1 % | above 10 % | their share of |dQ|")
    results = {}
    for deviation in (1.0, 2.0, 4.0, 8.0):
        exact, approximate = gradients(
            np.random.default_rng(0), args.queries, args.heads, deviation
        )
        size = np.linalg.norm(exact, axis=-1)
        error = np.linalg.norm(approximate - exact, axis=-1)
        far = error > 0.1 * size
        total = np.linalg.norm(size)
        found = (
            np.linalg.norm(error) / total,
            np.mean(error > 0.01 * size),
            np.mean(far),
            np.linalg.norm(size[far]) / total,
        )
        results[deviation] = tuple(float(x) for x in found)
        print(
            f"{deviation:17g} | {found[0]:11.1e} | {found[1]:14.2%} | {found[2]:10.2%} | "
            f"{found[3]:.2%}"
        )
    return results


if __name__ == "__main__":
    main()
