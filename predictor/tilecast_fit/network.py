"""The monotone network in JAX: training, and its weights as plain matrices.

    h = act(x W1 + b1[context])                      act: half of the units max(z, 0), half min(z, 0)
    v = h W2 + x S2 + b2[context]                    one value per algorithm and bottleneck
    log2 cycles = min over algorithms of max over bottlenecks of v, + b3[context]

x are the columns of `tilecast.kernels.features` less their means; all weights are non-negative. The last line is
how kernels behave: a library has several algorithms (tiles, splits) and takes the fastest, and each is held up
by its slowest resource. Minima and maxima of sums with non-negative weights never fall when a column grows, and
can take any such shape (Sill, Monotonic Networks, NIPS 1997; the two activations: Runje & Shankaranarayana,
ICML 2023). The weights into a unit sum to `steepest` at most, so doubling a dimension hardly more than doubles
the time: utilization does not fall with size, which keeps the network on course beyond the shapes it was trained
on. The context is a case plus a GPU's die; in training a share of the samples has the die hidden, which teaches
the general law. Early in training soft minima and maxima let every algorithm learn; they harden as the
temperature falls.
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
ALGORITHMS = 16
BOTTLENECKS = 8
BATCH = 1024
SCALE = 4.0
"""Common scale of the columns and the result, in units of log2: keeps the numbers near one."""
TEMPERATURE = 0.1
"""Softness at the start of training, in units of `SCALE` · log2 cycles."""
LEARNING_RATE = 4e-3
SILENT = 1e9
"""Scale of a column without variation: it standardises to nothing."""
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
        "w1": 0.3 * matrix(inputs, width),
        "w2": 0.2 * matrix(width, ALGORITHMS * BOTTLENECKS),
        "s2": 0.3 * matrix(inputs, ALGORITHMS * BOTTLENECKS),
    }
    for layer, size in (("1", width), ("2", ALGORITHMS * BOTTLENECKS), ("3", 1)):
        found[f"b{layer}"] = jnp.zeros(size)
        found[f"case{layer}"] = jnp.zeros((cases, size))
        found[f"die{layer}"] = jnp.zeros((dies, size))
        found[f"pair{layer}"] = jnp.zeros((dies * cases, size))
    found["b2"] = jnp.asarray(0.3 * rng.normal(size=ALGORITHMS * BOTTLENECKS), jnp.float32)
    found["b3"] = jnp.full(1, 12.0 / SCALE)
    return found


def weights(p: Parameters, steepest: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The non-negative matrices W1, W2 and S2. Their columns sum to one at most, W2's and S2's to `steepest`."""
    w1, w2, s2 = jnp.abs(p["w1"]), jnp.abs(p["w2"]), jnp.abs(p["s2"])
    total = jnp.maximum((w2.sum(axis=0) + s2.sum(axis=0)) / steepest, 1.0)
    return w1 / jnp.maximum(w1.sum(axis=0), 1.0), w2 / total, s2 / total


def _act(z: jax.Array) -> jax.Array:
    half = z.shape[-1] // 2
    return jnp.concatenate([jnp.maximum(z[..., :half], 0.0), jnp.minimum(z[..., half:], 0.0)], axis=-1)


def log2_cycles(
    p: Parameters, x: jax.Array, case: jax.Array, die: jax.Array, softness: jax.Array, steepest: float
) -> jax.Array:
    """The network on standardised columns (N, D), case and die indexes (N,); die 0 is none in particular.
    `softness` is the temperature of the minima and maxima. Shape (N,)."""
    known = (die > 0)[:, None]
    pair = die * p["case1"].shape[0] + case

    def bias(layer: str) -> jax.Array:
        own = p[f"die{layer}"][die] + p[f"pair{layer}"][pair]
        return p[f"b{layer}"] + p[f"case{layer}"][case] + jnp.where(known, own, 0.0)

    w1, w2, s2 = weights(p, steepest)
    v = (_act(x @ w1 + bias("1")) @ w2 + x @ s2 + bias("2")).reshape(-1, ALGORITHMS, BOTTLENECKS)
    slowest = softness * jax.nn.logsumexp(v / softness, axis=2)
    return SCALE * (-softness * jax.nn.logsumexp(-slowest / softness, axis=1) + bias("3")[:, 0])


def train(samples: Samples, *, steps: int, steepest: float, seed: int, report: Callable[[int], None]) -> Trained:
    """Fit a network to samples of one kind.

    The loss is the absolute relative error of the duration as the harness would show it, smoothed near zero.

    Args:
        samples: N measured kernels.
        steps: optimizer steps of `BATCH` samples.
        steepest: largest exponent with which time may grow with a dimension.
        seed: of the weights, the batches and the hidden dies.
        report: called now and then with the number of steps done.
    """
    mean = samples.columns.mean(axis=0)
    spread = samples.columns.std(axis=0)
    # A column that the data never varies (the batch of tensor-core GEMMs) teaches nothing and must not speak.
    scale = np.where(spread > 0.02, SCALE, SILENT)
    x = ((samples.columns - mean) / scale).astype(np.float32)
    cases = tuple(sorted(set(samples.case)))
    dies = ("", *sorted(set(samples.die)))
    case = np.array([cases.index(text) for text in samples.case])
    die = np.array([dies.index(text) for text in samples.die])
    share = samples.weight / samples.weight.sum()
    target = {name: values.astype(np.float32) for name, values in (
        ("log2_clock", np.log2(samples.clock_hz)), ("added", samples.added_s * 1e6), ("least", samples.least_s * 1e6),
        ("measured", np.log(samples.measured_s * 1e6)))}  # fmt: skip

    def loss(p: Parameters, batch: dict[str, jax.Array], softness: jax.Array) -> jax.Array:
        cycles = log2_cycles(p, batch["x"], batch["case"], batch["die"], softness, steepest)
        found = cycles - batch["log2_clock"] + np.log2(1e6)
        shown = jnp.maximum(jnp.exp2(jnp.clip(found, -10.0, 40.0)) + batch["added"], batch["least"])
        gap = jnp.abs(jnp.log(shown) - batch["measured"])
        return jnp.mean(jnp.where(gap < HUBER, gap * gap / (2 * HUBER), gap - HUBER / 2))

    optimizer = optax.adam(optax.cosine_decay_schedule(LEARNING_RATE, steps, 0.002))

    @jax.jit
    def step(
        p: Parameters, state: optax.OptState, batch: dict[str, jax.Array], softness: jax.Array
    ) -> tuple[Parameters, optax.OptState]:
        updates, state = optimizer.update(jax.grad(loss)(p, batch, softness), state, p)
        return optax.apply_updates(p, updates), state

    p = initial(seed, x.shape[1], len(cases), len(dies))
    state = optimizer.init(p)
    rng = np.random.default_rng(seed)
    order = np.zeros(0, np.int64)
    for number in range(steps):
        if len(order) < BATCH:
            order = rng.choice(len(x), size=max(len(x), BATCH), p=share)
        rows, order = order[:BATCH], order[BATCH:]
        hidden = samples.general[rows] & (rng.random(BATCH) < HIDDEN_DIE_SHARE)
        shown_die = np.where(hidden, 0, die[rows])
        batch = {name: values[rows] for name, values in target.items()}
        batch |= {"x": x[rows], "case": case[rows], "die": shown_die}
        softness = TEMPERATURE * max(0.01, 1.0 - number / (0.9 * steps))
        p, state = step(p, state, batch, jnp.float32(softness))
        if number % 200 == 199:
            report(200)
    seen = {text: tuple(sorted(set(samples.die[samples.case == text]))) for text in cases}
    plain = {name: np.asarray(value, np.float64) for name, value in p.items()}
    plain |= {
        name: np.asarray(value, np.float64)
        for name, value in zip(("w1", "w2", "s2"), weights(p, steepest), strict=True)
    }
    return Trained(
        samples.names, mean, scale, samples.columns.min(axis=0), samples.columns.max(axis=0), cases, dies, seen, plain
    )


def biases(net: Trained, layer: str) -> Floats:
    """The bias of a layer for every context, die by die and case by case, shape (dies · cases, size)."""
    w = net.weights
    own = np.repeat(w[f"die{layer}"], len(net.cases), axis=0) + w[f"pair{layer}"]
    own[: len(net.cases)] = 0.0
    table: Floats = w[f"b{layer}"] + np.tile(w[f"case{layer}"], (len(net.dies), 1)) + own
    return table


def predict(net: Trained, columns: Floats, context: Ints) -> Floats:
    """log2 cycles of N kernels by the trained weights in float64, shape (N,)."""
    w = net.weights
    x = (columns - net.mean) / net.scale
    z = x @ w["w1"] + biases(net, "1")[context]
    half = z.shape[1] // 2
    h = np.concatenate([np.maximum(z[:, :half], 0.0), np.minimum(z[:, half:], 0.0)], axis=1)
    v = h @ w["w2"] + x @ w["s2"] + biases(net, "2")[context]
    fastest: Floats = v.reshape(-1, ALGORITHMS, BOTTLENECKS).max(axis=2).min(axis=1)
    return SCALE * (fastest + biases(net, "3")[context][:, 0])
