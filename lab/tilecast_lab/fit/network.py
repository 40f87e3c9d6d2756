"""Monotone network in JAX: its training (`train`), and prediction with the trained weights in NumPy (`predict`).

    h = act(x W1 + b1[context])                      act: half of the units max(z, 0), half min(z, 0)
    v = h W2 + x S2 + b2[context]                    one value per algorithm and bottleneck
    log2 cycles = min over algorithms of max over bottlenecks of v, + b3[context]

x are the columns of `tilecast.kernels.features` less their means; all weights are non-negative. The last line models
kernels: a library has several algorithms (tiles, splits) and uses the fastest one, and each algorithm is bound by its
slowest resource. Minima and maxima of sums with non-negative weights never fall as a column grows, and can approximate
any such function (Sill, Monotonic Networks, NIPS 1997; the two activations: Runje & Shankaranarayana, ICML 2023). The
weights into a unit sum to at most `steepest`, so doubling a dimension hardly more than doubles the time. Utilization
then does not fall with size, which keeps the network plausible beyond the shapes of its training.

A refined family adds a term for the irregular choices of a library, which no monotone function can express:

    log2 cycles(x) = v(x) + sigmoid(tower(x, details)) · U(x)
    U(x) = min over dimensions d of v(x with d doubled) - v(x)

with U clipped to [0, `LARGEST_SHARE`]. The term is at least zero for the doubled kernel and at most U for the kernel
itself, so doubling still never lowers the time, whatever the tower returns.

The context is a case and a GPU's die. In training a share of the samples has the die hidden, so that the network also
learns the general law of all dies. Early in training soft minima and maxima let every algorithm learn; they harden as
the temperature falls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tilecast.spec import Floats, Ints
from tilecast_lab.fit.samples import Samples

Parameters = dict[str, jax.Array]
WIDTH = 96
ALGORITHMS = 16
BOTTLENECKS = 8
BATCH = 1024
SCALE = 4.0
"""Common scale of the columns and the result, in units of log2, which keeps the numbers near one."""
TEMPERATURE = 0.1
"""Softness at the start of training, in units of `SCALE` · log2 cycles."""
LEARNING_RATE = 4e-3
LEAST_SPREAD = 0.02
"""Least standard deviation of a column that the network uses."""
SILENT = 1e9
"""Scale of a column that varies less, so that it standardises to almost zero."""
HIDDEN_DIE_SHARE = 0.15
"""Share of the samples whose die is hidden in training."""
HUBER = 0.04
"""Relative error below which the loss is squared instead of absolute."""
COMMON = 100
"""Least number of samples for a case to have biases of its own in the layers `SHAPING`.

For a rarer case (attention's backward pass: a few shapes of one GPU) only the scale is learned; its dependence on the
shape is that of its family.
"""
SHAPING = ("1", "2")
"""Layers that determine the dependence on the shape."""
TOWER_WIDTH = 64
TOWER_DECAY = 0.1
TOWER_START = -1.0
LARGEST_SHARE = 0.5
"""Most that the tower may add, in log2 of the time."""
MARGIN = 1e-4
"""Margin by which the tower's room is reduced, in log2 of the time, so that rounding cannot break monotonicity."""


@dataclass(frozen=True, slots=True)
class Trained:
    """Trained network with the meaning of its inputs; `weights` has the monotone matrices as non-negative values."""

    names: tuple[str, ...]
    mean: Floats
    scale: Floats
    low: Floats
    high: Floats
    cases: tuple[str, ...]
    dies: tuple[str, ...]
    seen: dict[str, tuple[str, ...]]
    weights: dict[str, Floats]
    doubled: int
    details: int
    tower: Standardization

    @property
    def layers(self) -> dict[str, int]:
        """Layers that have a bias for every context, with their sizes."""
        return layers(self.details)


@dataclass(frozen=True, slots=True)
class Standardization:
    """Standardisation of columns and details for the tower; arrays are (D + E,).

    Values are clipped to the range seen in training, then reduced by the mean and divided by the standard deviation.
    """

    mean: Floats
    scale: Floats
    low: Floats
    high: Floats

    @classmethod
    def of(cls, values: Floats) -> Standardization:
        """Return the standardisation of samples (N, D + E)."""
        spread = values.std(axis=0)
        scale = np.where(spread > LEAST_SPREAD, spread, SILENT)
        return cls(values.mean(axis=0), scale, values.min(axis=0), values.max(axis=0))

    def __call__(self, values: Floats) -> Floats:
        """Return values (..., D + E) as the tower takes them."""
        result: Floats = (np.clip(values, self.low, self.high) - self.mean) / self.scale
        return result


def layers(details: int) -> dict[str, int]:
    """Return the layers that have a bias for every context, with their sizes, for a network with `details` details."""
    own = {"1": WIDTH, "2": ALGORITHMS * BOTTLENECKS, "3": 1}
    return own | ({"t1": TOWER_WIDTH, "t2": TOWER_WIDTH, "t3": 1} if details else {})


def initial_weights(seed: int, inputs: int, details: int, cases: int, dies: int) -> Parameters:
    """Return random weights for the given numbers of columns, details, cases and dies."""
    rng = np.random.default_rng(seed)

    def matrix(rows: int, cols: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=(rows, cols)) / np.sqrt(rows), jnp.float32)

    weights = {
        "w1": 0.3 * matrix(inputs, WIDTH),
        "w2": 0.2 * matrix(WIDTH, ALGORITHMS * BOTTLENECKS),
        "s2": 0.3 * matrix(inputs, ALGORITHMS * BOTTLENECKS),
    }
    if details:
        weights["wt1"] = matrix(inputs + details, TOWER_WIDTH)
        weights["wt2"] = matrix(TOWER_WIDTH, TOWER_WIDTH)
        weights["wt3"] = 0.1 * matrix(TOWER_WIDTH, 1)
    for layer, size in layers(details).items():
        weights[f"b{layer}"] = jnp.zeros(size)
        weights[f"case{layer}"] = jnp.zeros((cases, size))
        weights[f"die{layer}"] = jnp.zeros((dies, size))
        weights[f"pair{layer}"] = jnp.zeros((dies * cases, size))
    weights["b2"] = jnp.asarray(0.3 * rng.normal(size=ALGORITHMS * BOTTLENECKS), jnp.float32)
    weights["b3"] = jnp.full(1, 12.0 / SCALE)
    if details:
        weights["bt3"] = jnp.full(1, TOWER_START)
    return weights


def weights(p: Parameters, steepest: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the non-negative matrices W1, W2 and S2.

    The columns of W1 sum to at most one, those of W2 and S2 together to at most `steepest`.
    """
    w1, w2, s2 = jnp.abs(p["w1"]), jnp.abs(p["w2"]), jnp.abs(p["s2"])
    total = jnp.maximum((w2.sum(axis=0) + s2.sum(axis=0)) / steepest, 1.0)
    return w1 / jnp.maximum(w1.sum(axis=0), 1.0), w2 / total, s2 / total


def _act(z: jax.Array) -> jax.Array:
    half = z.shape[-1] // 2
    return jnp.concatenate([jnp.maximum(z[..., :half], 0.0), jnp.minimum(z[..., half:], 0.0)], axis=-1)


def _bias(p: Parameters, layer: str, case: jax.Array, die: jax.Array) -> jax.Array:
    share = jax.lax.stop_gradient(p["common"])[case] if layer in SHAPING else 1.0
    own = p[f"die{layer}"][die] + share * p[f"pair{layer}"][die * p["case1"].shape[0] + case]
    return p[f"b{layer}"] + share * p[f"case{layer}"][case] + jnp.where((die > 0)[:, None], own, 0.0)


def monotone_log2_cycles(
    p: Parameters, x: jax.Array, case: jax.Array, die: jax.Array, softness: jax.Array, steepest: float
) -> jax.Array:
    """Return log2 cycles of the monotone part, (..., N).

    Args:
        p: parameters.
        x: standardised columns, (..., N, D).
        case: indexes of the cases, (N,).
        die: indexes of the dies, (N,); 0 is no die in particular.
        softness: temperature of the minima and maxima.
        steepest: largest sum of the weights into a unit.
    """
    w1, w2, s2 = weights(p, steepest)
    v = _act(x @ w1 + _bias(p, "1", case, die)) @ w2 + x @ s2 + _bias(p, "2", case, die)
    v = v.reshape(*v.shape[:-1], ALGORITHMS, BOTTLENECKS)
    slowest = softness * jax.nn.logsumexp(v / softness, axis=-1)
    return SCALE * (-softness * jax.nn.logsumexp(-slowest / softness, axis=-1) + _bias(p, "3", case, die)[:, 0])


def predict_log2_cycles(
    p: Parameters, x: jax.Array, z: jax.Array, case: jax.Array, die: jax.Array, softness: jax.Array, steepest: float
) -> jax.Array:
    """Return log2 cycles of the whole network, (N,).

    `x` (1 + J, N, D) are the standardised columns of the kernels and of their doubles, `z` (N, D + E) the tower's
    inputs; the other arguments are those of `monotone_log2_cycles`. Without doubles there is no tower.
    """
    base = monotone_log2_cycles(p, x[0], case, die, softness, steepest)
    if x.shape[0] == 1:
        return base
    grown = monotone_log2_cycles(jax.lax.stop_gradient(p), x[1:], case, die, softness, steepest).min(axis=0)
    room = jnp.clip(grown - jax.lax.stop_gradient(base) - MARGIN, 0.0, LARGEST_SHARE)
    h = jax.nn.relu(z @ p["wt1"] + _bias(p, "t1", case, die))
    h = jax.nn.relu(h @ p["wt2"] + _bias(p, "t2", case, die))
    return base + room * jax.nn.sigmoid((h @ p["wt3"] + _bias(p, "t3", case, die))[:, 0])


def _loss(p: Parameters, batch: dict[str, jax.Array], softness: jax.Array, steepest: float) -> jax.Array:
    cycles = predict_log2_cycles(p, batch["x"], batch["z"], batch["case"], batch["die"], softness, steepest)
    predicted = cycles - batch["log2_clock"] + np.log2(1e6)
    shown = jnp.maximum(jnp.exp2(jnp.clip(predicted, -10.0, 40.0)) + batch["added"], batch["least"])
    gap = jnp.abs(jnp.log(shown) - batch["measured"])
    return jnp.mean(jnp.where(gap < HUBER, gap * gap / (2 * HUBER), gap - HUBER / 2))


def _plain(p: Parameters, steepest: float) -> dict[str, Floats]:
    """Return the parameters as arrays, with the monotone matrices as `weights` returns them."""
    matrices = zip(("w1", "w2", "s2"), weights(p, steepest), strict=True)
    return {name: np.asarray(value, np.float64) for name, value in (*p.items(), *matrices)}


def train(samples: Samples, *, steps: int, steepest: float, seed: int, report: Callable[[int], None]) -> Trained:
    """Fit a network to samples of one kind.

    The loss is the absolute relative error of the duration as the harness would show it, smoothed near zero.

    Args:
        samples: N measured kernels.
        steps: optimizer steps of `BATCH` samples.
        steepest: largest exponent with which time may grow with a dimension.
        seed: seed of the weights, the batches and the hidden dies.
        report: called every 200 steps with the number of steps done since the last call.
    """
    mean = samples.columns.mean(axis=0)
    spread = samples.columns.std(axis=0)
    # Nothing can be learned from a column that never varies (the batch of tensor-core GEMMs); silence it.
    scale = np.where(spread > LEAST_SPREAD, SCALE, SILENT)
    x = ((samples.stacked() - mean) / scale).astype(np.float32)
    tower = Standardization.of(samples.all_inputs())
    z = tower(samples.all_inputs()).astype(np.float32)
    cases = tuple(sorted(set(samples.case)))
    dies = ("", *sorted(set(samples.die)))
    case = np.array([cases.index(text) for text in samples.case])
    die = np.array([dies.index(text) for text in samples.die])
    share = samples.weight / samples.weight.sum()
    target = {name: values.astype(np.float32) for name, values in (
        ("log2_clock", np.log2(samples.clock_hz)), ("added", samples.added_s * 1e6), ("least", samples.least_s * 1e6),
        ("measured", np.log(samples.measured_s * 1e6)))}  # fmt: skip

    rate = optax.cosine_decay_schedule(LEARNING_RATE, steps, 0.002)
    optimizer = optax.adamw(rate, weight_decay=TOWER_DECAY, mask=lambda p: {name: "t" in name for name in p})

    @jax.jit
    def step(
        p: Parameters, state: optax.OptState, batch: dict[str, jax.Array], softness: jax.Array
    ) -> tuple[Parameters, optax.OptState]:
        updates, state = optimizer.update(jax.grad(_loss)(p, batch, softness, steepest), state, p)
        return optax.apply_updates(p, updates), state

    details = samples.details.shape[1]
    p = initial_weights(seed, x.shape[2], details, len(cases), len(dies))
    p["common"] = jnp.asarray(np.bincount(case, minlength=len(cases)) >= COMMON, jnp.float32)[:, None]
    state = optimizer.init(p)
    rng, order = np.random.default_rng(seed), np.zeros(0, np.int64)
    for number in range(steps):
        if len(order) < BATCH:
            order = rng.choice(len(samples), size=max(len(samples), BATCH), p=share)
        rows, order = order[:BATCH], order[BATCH:]
        hidden = samples.general[rows] & (rng.random(BATCH) < HIDDEN_DIE_SHARE)
        shown_die = np.where(hidden, 0, die[rows])
        batch = {name: values[rows] for name, values in target.items()}
        batch |= {"x": x[:, rows], "z": z[rows], "case": case[rows], "die": shown_die}
        softness = TEMPERATURE * max(0.01, 1.0 - number / (0.9 * steps))
        p, state = step(p, state, batch, jnp.float32(softness))
        if number % 200 == 199:
            report(200)
    seen = {text: tuple(sorted(set(samples.die[samples.case == text]))) for text in cases}
    return Trained(
        samples.names, mean, scale, samples.columns.min(axis=0), samples.columns.max(axis=0), cases, dies, seen,
        _plain(p, steepest), len(x) - 1, details, tower,
    )  # fmt: skip


def layer_biases(net: Trained, layer: str) -> Floats:
    """Return the bias of a layer for every context, ordered by die and then by case, (dies · cases, size)."""
    w = net.weights
    share = np.tile(w["common"], (len(net.dies), 1)) if layer in SHAPING else 1.0
    own = np.repeat(w[f"die{layer}"], len(net.cases), axis=0) + share * w[f"pair{layer}"]
    own[: len(net.cases)] = 0.0
    table: Floats = w[f"b{layer}"] + share * np.tile(w[f"case{layer}"], (len(net.dies), 1)) + own
    return table


def predict(net: Trained, samples: Samples, context: Ints) -> Floats:
    """Return log2 cycles of N kernels, computed with the trained weights in float64, (N,).

    `context` (N,) is the index of the die times the number of cases plus the index of the case.
    """
    w = net.weights
    x = (samples.stacked() - net.mean) / net.scale
    z = x @ w["w1"] + layer_biases(net, "1")[context]
    half = z.shape[-1] // 2
    h = np.concatenate([np.maximum(z[..., :half], 0.0), np.minimum(z[..., half:], 0.0)], axis=-1)
    v = h @ w["w2"] + x @ w["s2"] + layer_biases(net, "2")[context]
    fastest = v.reshape(*v.shape[:-1], ALGORITHMS, BOTTLENECKS).max(axis=-1).min(axis=-1)
    log2_cycles: Floats = SCALE * (fastest + layer_biases(net, "3")[context][:, 0])
    base: Floats = log2_cycles[0]
    if not net.doubled:
        return base
    h = np.maximum(net.tower(samples.all_inputs()) @ w["wt1"] + layer_biases(net, "t1")[context], 0.0)
    h = np.maximum(h @ w["wt2"] + layer_biases(net, "t2")[context], 0.0)
    share = 1.0 / (1.0 + np.exp(-(h @ w["wt3"] + layer_biases(net, "t3")[context])[:, 0]))
    room = np.clip(log2_cycles[1:].min(axis=0) - base - MARGIN, 0.0, LARGEST_SHARE)
    refined: Floats = base + room * share
    return refined
