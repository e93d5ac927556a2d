"""Hierarchical tree attention in float64, for one query and one KV head group at a time."""

from __future__ import annotations

import numpy as np


def layers(x: np.ndarray, compression: int, top_k: int) -> list[np.ndarray]:
    """Returns the layers of the tree over the tokens x [S, ...], tokens first."""
    tree = [x]
    while len(tree[-1]) > compression * top_k:
        below = tree[-1]
        means = [below[i : i + compression].mean(0) for i in range(0, len(below), compression)]
        tree.append(np.stack(means))
    return tree


def rope(x: np.ndarray, position: int, base: float) -> np.ndarray:
    """Returns x [D] rotated to `position`."""
    half = len(x) // 2
    out = np.empty_like(x)
    for i in range(half):
        angle = position * base ** (-2 * i / len(x))
        out[i] = x[i] * np.cos(angle) - x[i + half] * np.sin(angle)
        out[i + half] = x[i + half] * np.cos(angle) + x[i] * np.sin(angle)
    return out


def query(q, k, v, position, compression, top_k, scale, base, choice=None):
    """Attends with one query's heads q [M, D] to the tree of one KV head (lists of layers k, v).

    If `choice` is given, it contains the nodes to select in each layer.

    Returns out [M, E], lse [M], and for each layer the candidates and the selected nodes.
    """
    scores = [[] for _ in q]  # by head, of all nodes that are not selected
    values = []
    candidates, selected = [None] * len(k), [[] for _ in k]
    for level in reversed(range(len(k))):
        last = position // compression**level
        if level == len(k) - 1:
            nodes = list(range(last + 1))
        else:
            nodes = [
                parent * compression + slot
                for parent in selected[level + 1]
                for slot in range(compression)
                if parent * compression + slot <= last
            ]
        candidates[level] = nodes
        n = len(nodes)
        rotated = [rope(head, n - 1, base) for head in q]
        scored = nodes if level == 0 else nodes[:-1]
        s = np.array(
            [
                [scale * (h @ rope(k[level][c], i, base)) for h in rotated]
                for i, c in enumerate(scored)
            ]
        )
        if level and n:
            importance = [np.logaddexp.reduce(row) for row in s]
            order = sorted(range(n - 1), key=lambda i: (-importance[i], i))
            best = sorted(order[: top_k - 1])
            selected[level] = [nodes[i] for i in best] + [last]
            if choice is not None:
                selected[level] = list(choice[level])
        for i, node in enumerate(scored):
            if node not in selected[level]:
                values.append(v[level][node])
                for head in range(len(q)):
                    scores[head].append(s[i, head])
    lse = np.array([np.logaddexp.reduce(row) if row else -np.inf for row in scores])
    out = np.zeros((len(q), v[0].shape[-1]))
    for head, row in enumerate(scores):
        for s, value in zip(row, values, strict=True):
            out[head] += np.exp(s - lse[head]) * value
    return out, lse, candidates, selected


def attention(q, k, v, *, compression, top_k, scale=None, rope_base=10000.0, choice=None):
    """Returns the attention of q [B, T, N, D] to k [B, T, G, D] and v [B, T, G, E].

    If `choice` is given, it maps (b, t, g) to the nodes to select in each layer.

    Returns out [B, T, N, E], lse [B, T, N], and {(b, t, g): (candidates, selected)}, each a list of
    lists by layer.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    batch, tokens, heads, dim = q.shape
    groups = k.shape[2]
    size = heads // groups
    scale = dim**-0.5 if scale is None else scale
    out = np.zeros((batch, tokens, heads, v.shape[-1]))
    lse = np.zeros((batch, tokens, heads))
    seen = {}
    for b in range(batch):
        for g in range(groups):
            tree = [layers(x[b, :, g], compression, top_k) for x in (k, v)]
            for t in range(tokens):
                heads_of_group = slice(g * size, (g + 1) * size)
                out[b, t, heads_of_group], lse[b, t, heads_of_group], *seen[b, t, g] = query(
                    q[b, t, heads_of_group],
                    *tree,
                    t,
                    compression,
                    top_k,
                    scale,
                    rope_base,
                    None if choice is None else choice[b, t, g],
                )
    return out, lse, seen


def dense(q, k, v, *, scale=None, rope_base=10000.0):
    """Returns dense causal attention with RoPE by position."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    batch, tokens, heads, dim = q.shape
    size = heads // k.shape[2]
    scale = dim**-0.5 if scale is None else scale
    out = np.zeros((batch, tokens, heads, v.shape[-1]))
    for b, t, n in np.ndindex(batch, tokens, heads):
        rotated = rope(q[b, t, n], t, rope_base)
        s = np.array(
            [scale * (rotated @ rope(k[b, i, n // size], i, rope_base)) for i in range(t + 1)]
        )
        p = np.exp(s - s.max())
        out[b, t, n] = (p / p.sum()) @ v[b, : t + 1, n // size]
    return out


def selected_nodes(ordinals, position, sizes, compression):
    """Returns the nodes with these ordinals [layers - 1, K], as `query` expects its `choice`."""
    chosen = [[] for _ in sizes]
    parents = None
    for level in range(len(sizes) - 1, 0, -1):
        nodes = np.arange(position // compression**level + 1)
        if parents is not None:
            nodes = (parents[:, None] * compression + np.arange(compression)).ravel()
        row = ordinals[level - 1]
        parents = nodes[row[row >= 0]]
        chosen[level] = parents.tolist()
    return chosen


def times_covered(ordinals, position, tokens, sizes, compression, top_k):
    """Returns how often each token is contained in the nodes that one query attends to.

    `ordinals` [layers - 1, K] are those that the query selects in layers 1, 2, ... of these sizes.
    """
    times = np.zeros(tokens, int)
    parents = None
    for level in reversed(range(len(sizes))):
        span = compression**level
        if parents is None:
            nodes = np.arange(position // span + 1)
        else:
            nodes = (parents[:, None] * compression + np.arange(compression)).ravel()
            nodes = nodes[nodes <= position // span]
        chosen = np.zeros(len(nodes), bool)
        if level:
            row = ordinals[level - 1]
            row = row[row >= 0]
            assert len(row) == min(len(nodes), top_k) and np.all(np.diff(row) > 0)
            chosen[row] = True
            assert chosen[-1]
            parents = nodes[chosen]
        for node in nodes[~chosen]:
            times[node * span : (node + 1) * span] += 1
    return times


def assert_partition(selected, positions, tokens, sizes, **options):
    """Checks that each query attends to every token up to its own exactly once, and to no other.

    `selected` contains the ordinals [layers - 1, K] of each query.
    """
    for ordinals, position in zip(selected, positions, strict=True):
        times = times_covered(ordinals, position, tokens, sizes, **options)
        np.testing.assert_array_equal(times, np.arange(tokens) <= position)


def exact_problem(rng, tokens, heads, dim, compression):
    """Returns queries [1, tokens, heads, dim] and keys [1, tokens, 1, dim] with exact scores.

    They are small integers in dimensions that rotate by less than a rounding error if `rope_base`
    is 1e38. So scores are exact and many are equal. All heads have the same query.
    """
    used = slice(dim // 2 - dim // 8, dim // 2)  # dimensions that hardly rotate
    q, k = np.zeros((1, tokens, heads, dim)), np.zeros((1, tokens, 1, dim))
    q[..., used] = rng.integers(-3, 4, (1, tokens, 1, dim // 8))
    blocks = rng.integers(-3, 4, (-(-tokens // compression), dim // 8))
    k[0, :, 0, used] = np.repeat(blocks, compression, axis=0)[:tokens]
    return q, k


def exact_selection(q, k, position, compression, top_k):
    """Returns the ordinals that one query q [dim] of an `exact_problem` selects, from layer 1 on.

    k is the problem's keys [tokens, dim].
    """
    tree = layers(k, compression, top_k)
    ordinals = [None] * (len(tree) - 1)
    parents = None
    for level in range(len(tree) - 1, 0, -1):
        last = position // compression**level
        if parents is None:
            nodes = np.arange(last + 1)
        else:
            nodes = (parents[:, None] * compression + np.arange(compression)).ravel()
            nodes = nodes[nodes <= last]
        best = np.argsort(-(tree[level][nodes[:-1]] @ q), kind="stable")[: top_k - 1]
        chosen = np.append(np.sort(best), len(nodes) - 1)
        ordinals[level - 1] = chosen
        parents = nodes[chosen]
    return ordinals
