"""Speed of strategies per layer: 96 layers with 20 strategies each, and a whole job."""

from __future__ import annotations

import time

import numpy as np

from tilecast import chain, perlayer, zoo
from tilecast.chain import Chain
from tilecast.hardware import Pool, find_gpu, find_link
from tilecast.spec import Workload

LAYERS, STRATEGIES = 96, 20
KINDS = (1, 2, 4, 8, 96)
SHARES = (0.1, 0.4, 0.6, 0.9)
"""Budgets, as shares of the way from the leanest memory to that of the fastest strategies."""


def chain_of(kinds: int, share: float) -> Chain:
    """Return a chain of layers of `kinds` kinds, where fast strategies take much memory and every change costs."""
    rng = np.random.default_rng(kinds)
    kind = np.sort(np.arange(LAYERS) % kinds)
    cost = rng.uniform(1, 2, (kinds, STRATEGIES))
    memory = 1e9 * (2.2 - cost) * rng.uniform(0.8, 1.2, cost.shape)
    working = rng.choice(6, cost.shape) * 2e8
    change = rng.uniform(0, 0.3, (STRATEGIES, STRATEGIES))
    np.fill_diagonal(change, 0)
    lean = memory.min(axis=1)[kind].sum()
    rich = memory[np.arange(kinds), cost.argmin(axis=1)][kind].sum() + working.max()
    every = np.repeat(change[None], LAYERS - 1, axis=0)
    return Chain(cost[kind], every, memory[kind], working[kind], lean + share * (rich - lean))


def main() -> None:
    """Print the figures."""
    print(f"{LAYERS} layers x {STRATEGIES} strategies, memory that binds; processor seconds")
    worst = 0.0
    for kinds in KINDS:
        for share in SHARES:
            one = chain_of(kinds, share)
            start = time.process_time()
            path = chain.find_cheapest_path(one)
            spent = time.process_time() - start
            worst = max(worst, spent)
            gap = f"gap {path.cost / path.bound - 1:.1e}" if path else "nothing fits"
            print(f"{kinds:3d} kinds  {share:.0%} of the room  {spent:6.3f} s  {gap}")
    pool = Pool("l4", find_gpu("l4"), 8, 4, find_link("pcie4"), find_link("ethernet-100"))
    workload = Workload(zoo.find_preset("llama-2-7b"), 4096, 64, "bf16")
    start = time.process_time()
    perlayer.find_best_strategies(workload, pool, 32)
    print(f"llama-2-7b on 32 L4, from the job to its strategies: {time.process_time() - start:.2f} s")
    print(f"{worst:.3f} s at worst for {LAYERS} x {STRATEGIES}")


if __name__ == "__main__":
    main()
