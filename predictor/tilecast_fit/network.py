"""The monotone network in JAX: training, and its weights as plain matrices.

    h1 = act(x |W1| + b1[context])        act: half of the units max(z, 0), half min(z, 0)
    h2 = act(h1 |W2| + x |S2| + b2[context])
    log2 cycles = h2 |W3| + x |S3| + b3[context]

x are the standardised columns of `tilecast.kernels.features`. Weights enter by their absolute value and both
activations are non-decreasing, one convex and one concave, so the sum can bend both ways and never falls
(Runje & Shankaranarayana, Constrained Monotonic Neural Networks, ICML 2023, sec. 3). The context is a case
plus a GPU's die; in training a share of the samples has the die hidden, which is what teaches the general law.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tilecast.spec import Floats, Ints
from tilecast_fit.samples import Samples

Parameters = dict[str, jax.Array]
WIDTH = 96
BATCH = 1024
LEARNING_RATE = 4e-3
HIDDEN_DIE_SHARE = 0.15
HUBER = 0.04
"""Relative error below which the loss turns from absolute to squared."""


@dataclass(frozen=True, slots=True)
class Trained:
    """A trained network with what its inputs mean; `weights` are the parameters after the absolute value."""

    names: tuple[str, ...]
    mean: Floats
    scale: Floats
    low: Floats
    high: Floats
    cases: tuple[str, ...]
    dies: tuple[str, ...]
    seen: dict[str, tuple[str, ...]]
    weights: dict[str, Floats]


def initial(seed: int, inputs: int, cases: int, dies: int, width: int = WIDTH) -> Parameters:
    """Random weights for that many columns, cases and dies."""
    rng = np.random.default_rng(seed)

    def matrix(rows: int, cols: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=(rows, cols)) / np.sqrt(rows), jnp.float32)

    found = {
        "w1": matrix(inputs, width),
        "w2": matrix(width, width),
        "s2": 0.3 * matrix(inputs, width),
        "w3": matrix(width, 1),
        "s3": matrix(inputs, 1),
    }
    for layer, size in (("1", width), ("2", width), ("3", 1)):
        found[f"b{layer}"] = jnp.zeros(size)
        found[f"case{layer}"] = jnp.zeros((cases, size))
        found[f"die{layer}"] = jnp.zeros((dies * cases, size))
    found["b3"] = jnp.full(1, 12.0)
    return found


def _act(z: jax.Array) -> jax.Array:
    half = z.shape[-1] // 2
    return jnp.concatenate([jnp.maximum(z[..., :half], 0.0), jnp.minimum(z[..., half:], 0.0)], axis=-1)


def log2_cycles(p: Parameters, x: jax.Array, case: jax.Array, context: jax.Array) -> jax.Array:
    """The network on standardised columns (N, D), case and context indexes (N,); a context below the number
    of cases has no die. Shape (N,)."""
    cases = p["case1"].shape[0]
    known = (context >= cases)[:, None]

    def bias(layer: str) -> jax.Array:
        return p[f"b{layer}"] + p[f"case{layer}"][case] + jnp.where(known, p[f"die{layer}"][context], 0.0)

    h1 = _act(x @ jnp.abs(p["w1"]) + bias("1"))
    h2 = _act(h1 @ jnp.abs(p["w2"]) + x @ jnp.abs(p["s2"]) + bias("2"))
    return (h2 @ jnp.abs(p["w3"]) + x @ jnp.abs(p["s3"]) + bias("3"))[:, 0]


def train(samples: Samples, *, steps: int, seed: int, report: Callable[[int], None]) -> Trained:
    """Fit a network to samples of one kind.

    The loss is the absolute relative error of the duration as the harness would show it, smoothed near zero.

    Args:
        samples: N measured kernels.
        steps: optimizer steps of `BATCH` samples.
        seed: of the weights, the batches and the hidden dies.
        report: called now and then with the number of steps done.
    """
    mean = samples.columns.mean(axis=0)
    scale = np.maximum(samples.columns.std(axis=0), 1e-3)
    x = ((samples.columns - mean) / scale).astype(np.float32)
    cases = tuple(sorted(set(samples.case)))
    dies = ("", *sorted(set(samples.die)))
    case = np.array([cases.index(text) for text in samples.case])
    die = np.array([dies.index(text) for text in samples.die])
    share = samples.weight / samples.weight.sum()
    target = {name: values.astype(np.float32) for name, values in (
        ("log2_clock", np.log2(samples.clock_hz)), ("added", samples.added_s * 1e6), ("least", samples.least_s * 1e6),
        ("measured", np.log(samples.measured_s * 1e6)))}  # fmt: skip

    def loss(p: Parameters, batch: dict[str, jax.Array]) -> jax.Array:
        found = log2_cycles(p, batch["x"], batch["case"], batch["context"]) - batch["log2_clock"] + np.log2(1e6)
        shown = jnp.maximum(jnp.exp2(jnp.clip(found, -10.0, 40.0)) + batch["added"], batch["least"])
        gap = jnp.abs(jnp.log(shown) - batch["measured"])
        return jnp.mean(jnp.where(gap < HUBER, gap * gap / (2 * HUBER), gap - HUBER / 2))

    optimizer = optax.adam(optax.cosine_decay_schedule(LEARNING_RATE, steps, 0.002))

    @jax.jit
    def step(p: Parameters, state: optax.OptState, batch: dict[str, jax.Array]) -> tuple[Parameters, optax.OptState]:
        updates, state = optimizer.update(jax.grad(loss)(p, batch), state, p)
        return optax.apply_updates(p, updates), state

    p = initial(seed, x.shape[1], len(cases), len(dies))
    state = optimizer.init(p)
    rng = np.random.default_rng(seed)
    order = np.zeros(0, np.int64)
    for number in range(steps):
        if len(order) < BATCH:
            order = rng.choice(len(x), size=max(len(x), BATCH), p=share)
        rows, order = order[:BATCH], order[BATCH:]
        shown_die = np.where(rng.random(BATCH) < HIDDEN_DIE_SHARE, 0, die[rows])
        batch = {name: values[rows] for name, values in target.items()}
        batch |= {"x": x[rows], "case": case[rows], "context": shown_die * len(cases) + case[rows]}
        p, state = step(p, state, batch)
        if number % 200 == 199:
            report(200)
    seen = {text: tuple(sorted(set(samples.die[samples.case == text]))) for text in cases}
    weights = {name: np.asarray(jnp.abs(value) if name[0] in "ws" else value, np.float64) for name, value in p.items()}
    return Trained(
        samples.names, mean, scale, samples.columns.min(axis=0), samples.columns.max(axis=0), cases, dies, seen, weights
    )


def predict(net: Trained, columns: Floats, case: Ints, context: Ints) -> Floats:
    """log2 cycles of N kernels by the trained weights in float64, shape (N,)."""
    w = net.weights

    def act(z: Floats) -> Floats:
        half = z.shape[1] // 2
        return np.concatenate([np.maximum(z[:, :half], 0.0), np.minimum(z[:, half:], 0.0)], axis=1)

    def bias(layer: str) -> Floats:
        die = np.where((context >= len(net.cases))[:, None], w[f"die{layer}"][context], 0.0)
        return w[f"b{layer}"] + w[f"case{layer}"][case] + die

    x = (columns - net.mean) / net.scale
    h1 = act(x @ w["w1"] + bias("1"))
    h2 = act(h1 @ w["w2"] + x @ w["s2"] + bias("2"))
    return (h2 @ w["w3"] + x @ w["s3"] + bias("3"))[:, 0]
