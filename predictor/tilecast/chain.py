"""Choose the cheapest strategy of each link of a chain under a memory budget, and cut a chain into even stages.

A link costs its strategy, plus the change from the strategy of the previous link (a Markov chain). Without a budget,
Viterbi's algorithm finds the cheapest path. Memory couples all links: it is summed over them, and the largest working
memory of any link is added. The search then extends labels, as for resource-constrained shortest paths (Irnich and
Desaulniers, 2005). A label is the cost and the memory of the beginning of a path. Each strategy of the last link has
its own list of labels:

* a label is dropped if another label with the same strategy beats it in cost and in memory, since any ending suits
both;
* a label is dropped if it cannot become cheaper than a known path. The bound is Lagrange's: for a price μ >= 0 of a
  byte, cost + μ (memory - budget) over the best ending is never more than the true cost of a path that fits.

Neither rule drops all optimal paths, so the result is exact. Costs are counted in picoseconds and memory in bytes, as
integers: sums are exact, and equal beginnings compare as equal. If more than `MOST_LABELS` labels remain at a link,
those with the smallest bounds are kept. The smallest bound among the others limits how far the result can be from the
optimum.

`find_cheapest_path` and `find_stage_starts` are the entry points.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tilecast.spec import Floats, Ints

MOST_LABELS = 1000
"""Most labels that are kept at a link. Exact answers need far fewer."""
PICO = 1e12


@dataclass(frozen=True, slots=True)
class Chain:
    """A chain of N links, each of which runs with one of S strategies. An infinite cost forbids a strategy.

    Costs are in seconds, and memory is in bytes.
    """

    cost: Floats
    """Cost of each link with each strategy, (N, S)."""
    change: Floats
    """Cost between links i and i + 1, from a strategy (row) to a strategy (column), (N - 1, S, S)."""
    memory: Floats
    """Bytes that a link holds all the time, (N, S)."""
    working: Floats
    """Bytes that a link holds while it runs, (N, S)."""
    budget: float
    """Bytes for the sum of `memory` and the largest `working` memory."""


@dataclass(frozen=True, slots=True)
class Path:
    """A strategy for each link, (N,), with the cost of the path in seconds and its memory in bytes.

    `bound` is a lower bound on the cost of every path that fits. It equals `cost` if the path is proved optimal.
    """

    strategies: Ints
    cost: float
    memory: float
    bound: float


def price_strategies(chain: Chain, strategies: Ints) -> tuple[Floats, Floats]:
    """Return two arrays of shape (...): cost in seconds and memory in bytes of paths with strategies (..., N)."""
    links = np.arange(strategies.shape[-1])
    changes = chain.change[links[:-1], strategies[..., :-1], strategies[..., 1:]].sum(-1)
    memory = chain.memory[links, strategies].sum(-1) + chain.working[links, strategies].max(-1)
    return chain.cost[links, strategies].sum(-1) + changes, memory


def find_cheapest_path(chain: Chain, limit_s: float = np.inf) -> Path | None:
    """Return the cheapest path whose memory fits the budget and that costs less than `limit_s` seconds.

    Return None if there is no such path.
    """
    whole = _ChainInPicoseconds.from_chain(chain)
    limit = limit_s * PICO
    best: _PathSolution | None = None
    open_parts: list[tuple[float, float, _ChainInPicoseconds]] = []
    byte_price = 0.0
    for cap in np.unique(whole.working[whole.allowed & (whole.working <= whole.budget)])[::-1]:
        part = whole.with_workspace_limit(int(cap))
        if part is None or part.solve_lagrangian_relaxation(byte_price)[0] >= limit:
            continue
        bound, byte_price, known = part.solve_dual()
        if known.cost < limit:
            best, limit = known, known.cost
        open_parts.append((bound, byte_price, part))
    if not open_parts:
        return None
    open_parts.sort(key=lambda item: item[0])
    least = limit
    for bound, byte_price, part in open_parts:
        if bound < limit:
            better, dropped = part.search_by_label_setting(byte_price, limit)
            least = min(least, dropped)
            if better is not None and better.cost < limit:
                best, limit = better, better.cost
    if best is None:
        return None
    cost, memory = price_strategies(chain, best.strategies)
    cost_s = float(cost)
    return Path(best.strategies, cost_s, float(memory), min(cost_s, least / PICO))


@dataclass(frozen=True, slots=True)
class _PathSolution:
    """A path and its cost in picoseconds."""

    strategies: Ints
    cost: int


_FORBIDDEN = np.iinfo(np.int64).max // 4


@dataclass(frozen=True, slots=True)
class _ChainInPicoseconds:
    """A `Chain` with costs in whole picoseconds and memory in whole bytes.

    `allowed` is the mask of strategies that may be used, (N, S).
    """

    cost: Ints
    change: Ints
    memory: Ints
    working: Ints
    allowed: npt.NDArray[np.bool_]
    budget: int

    @classmethod
    def from_chain(cls, chain: Chain) -> _ChainInPicoseconds:
        allowed = np.isfinite(chain.cost)
        return cls(
            np.rint(np.where(allowed, chain.cost, 0.0) * PICO).astype(np.int64),
            np.rint(chain.change * PICO).astype(np.int64),
            np.ceil(chain.memory).astype(np.int64),
            np.ceil(chain.working).astype(np.int64),
            allowed,
            int(chain.budget),
        )

    def with_workspace_limit(self, cap: int) -> _ChainInPicoseconds | None:
        """Return a copy of the chain without strategies that need more than `cap` bytes of working memory.

        The budget of the copy is smaller by `cap` bytes. The result is None if no path fits.
        """
        allowed = self.allowed & (self.working <= cap)
        part = _ChainInPicoseconds(self.cost, self.change, self.memory, self.working, allowed, self.budget - cap)
        lean = np.where(allowed, self.memory, _FORBIDDEN).min(axis=1)
        return part if allowed.any(axis=1).all() and lean.sum() <= part.budget else None

    def solve_lagrangian_relaxation(self, byte_price: float) -> tuple[float, _PathSolution, int]:
        """Find the cheapest path by Viterbi's algorithm if each byte has a price in picoseconds and there is no budget.

        Returns:
            A lower bound in picoseconds on every path that fits, the cheapest path, and the bytes of that path.
        """
        node = np.where(self.allowed, self.cost + byte_price * self.memory, np.inf)
        value = node[0]
        back = np.zeros(self.cost.shape, np.int64)
        for link in range(1, len(node)):
            through = value[:, None] + self.change[link - 1]
            back[link] = through.argmin(axis=0)
            value = through.min(axis=0) + node[link]
        path = np.zeros(len(node), np.int64)
        path[-1] = value.argmin()
        for link in range(len(node) - 1, 0, -1):
            path[link - 1] = back[link, path[link]]
        cost, memory = self.sum_path(path)
        return float(value.min()) - byte_price * self.budget, _PathSolution(path, cost), memory

    def sum_path(self, path: Ints) -> tuple[int, int]:
        """Return the cost in picoseconds and the memory in bytes of a path, which is a strategy for each link, (N,)."""
        links = np.arange(len(path))
        cost = self.cost[links, path].sum() + self.change[links[:-1], path[:-1], path[1:]].sum()
        return int(cost), int(self.memory[links, path].sum())

    def solve_dual(self) -> tuple[float, float, _PathSolution]:
        """Return the best lower bound in picoseconds, the byte price that gives it, and a path that fits the budget.

        Two paths, one over the budget and one within it, are points (memory, cost). The slope between them is the next
        byte price, and the best path at this price replaces one of them. The search ends when no path lies below the
        line.
        """
        bound, rich, rich_bytes = self.solve_lagrangian_relaxation(0.0)
        if rich_bytes <= self.budget:
            return bound, 0.0, rich
        lean_path = np.where(self.allowed, self.memory, _FORBIDDEN).argmin(axis=1)
        lean_cost, lean_bytes = self.sum_path(lean_path)
        lean = _PathSolution(lean_path, lean_cost)
        byte_price = 0.0
        while lean.cost > rich.cost:
            slope = (lean.cost - rich.cost) / (rich_bytes - lean_bytes)
            line = rich.cost + slope * (rich_bytes - self.budget)
            value, middle, middle_bytes = self.solve_lagrangian_relaxation(slope)
            if value > bound:
                bound, byte_price = value, slope
            if value >= line - 1 - 1e-12 * abs(line):
                break
            if middle_bytes <= self.budget:
                lean, lean_bytes = middle, middle_bytes
            else:
                rich, rich_bytes = middle, middle_bytes
        return bound, byte_price, self._splice_paths(rich, lean)

    def _splice_paths(self, rich: _PathSolution, lean: _PathSolution) -> _PathSolution:
        """Return the cheapest path within the budget that starts like one of two paths and ends like the other."""
        best = lean
        for one, other in ((rich, lean), (lean, rich)):
            for link in range(1, len(one.strategies)):
                path = np.concatenate([one.strategies[:link], other.strategies[link:]])
                cost, memory = self.sum_path(path)
                if memory <= self.budget and cost < best.cost:
                    best = _PathSolution(path, cost)
        return best

    def search_by_label_setting(self, byte_price: float, known: float) -> tuple[_PathSolution | None, float]:
        """Return the cheapest path that fits and costs less than `known`, and the smallest bound of the dropped labels.

        Costs are in picoseconds. The path is None if no path fits. The bound is infinite if no label was dropped
        because of `MOST_LABELS`.
        """
        count, width = self.cost.shape
        ending = np.zeros((count, width))
        leanest = np.zeros(count, np.int64)
        node = np.where(self.allowed, self.cost + byte_price * self.memory, np.inf)
        lean = np.where(self.allowed, self.memory, _FORBIDDEN).min(axis=1)
        for link in range(count - 2, -1, -1):
            ending[link] = (self.change[link] + node[link + 1] + ending[link + 1]).min(axis=1)
            leanest[link] = leanest[link + 1] + lean[link + 1]
        limit = known * (1 + 1e-12) + 2.0  # rounding of sums of floats stays below this
        dropped = np.inf
        chosen, parents = [], []
        strategy = np.flatnonzero(self.allowed[0])
        parent = np.full(len(strategy), -1)
        cost, memory = self.cost[0, strategy], self.memory[0, strategy]
        for link in range(count):
            if link:
                offered = np.flatnonzero(self.allowed[link])
                parent = np.repeat(np.arange(len(strategy)), len(offered))
                new = np.tile(offered, len(strategy))
                cost = cost[parent] + self.change[link - 1, strategy[parent], new] + self.cost[link, new]
                memory, strategy = memory[parent] + self.memory[link, new], new
            bound = cost + byte_price * (memory - self.budget) + ending[link, strategy]
            rows = np.flatnonzero((memory + leanest[link] <= self.budget) & (bound < limit))
            rows = rows[_select_undominated(strategy[rows], memory[rows], cost[rows])]
            if len(rows) > MOST_LABELS:
                order = np.argsort(bound[rows], kind="stable")
                dropped = min(dropped, float(bound[rows[order[MOST_LABELS]]]))
                rows = rows[np.sort(order[:MOST_LABELS])]
            strategy, cost, memory, parent = strategy[rows], cost[rows], memory[rows], parent[rows]
            chosen.append(strategy)
            parents.append(parent)
            if not len(rows):
                return None, dropped
        row = int(cost.argmin())
        total = int(cost[row])
        path = np.zeros(count, np.int64)
        for link in range(count - 1, -1, -1):
            path[link], row = chosen[link][row], parents[link][row]
        return _PathSolution(path, total), dropped


def _select_undominated(strategy: Ints, memory: Ints, cost: Ints) -> npt.NDArray[np.intp]:
    """Return the rows that no other row with the same strategy beats in both memory and cost.

    Of equal rows, one is returned.
    """
    if not len(cost):
        return np.zeros(0, np.intp)
    order = np.lexsort((cost, memory, strategy))
    # Costs shifted by strategy fall from group to group, so one running minimum is enough for all groups.
    shifted = cost[order] - strategy[order] * (int(cost.max()) + 1)
    before = np.concatenate([[np.iinfo(np.int64).max], np.minimum.accumulate(shifted)[:-1]])
    return np.sort(order[shifted < before])


def find_stage_starts(cost: Floats, fits: npt.NDArray[np.bool_], stages: int) -> Ints | None:
    """Return the first link of each stage, (stages,), so that the costliest stage costs least, or None if nothing fits.

    The method is dynamic programming over the last cut. For the first i links in k stages, best(k, i) is the minimum
    over j < i of the larger one of best(k - 1, j) and the cost of links j to i.

    Args:
        cost: cost of each link, (N,).
        fits: [k, i, j] is whether links i to j - 1 fit the k-th stage, (stages, N + 1, N + 1).
        stages: number of stages. Each has at least one link.
    """
    count = len(cost)
    upto = np.concatenate([[0.0], np.cumsum(cost)])
    span = np.where(np.triu(np.ones((count + 1, count + 1), bool), 1), upto[None, :] - upto[:, None], np.inf)
    best = np.where(fits[0, 0], span[0], np.inf)
    back = np.zeros((stages, count + 1), np.int64)
    for stage in range(1, stages):
        through = np.maximum(best[:, None], np.where(fits[stage], span, np.inf))
        back[stage] = through.argmin(axis=0)
        best = through.min(axis=0)
    if not np.isfinite(best[count]):
        return None
    first, end = np.zeros(stages, np.int64), count
    for stage in range(stages - 1, -1, -1):
        first[stage] = end = back[stage, end] if stage else 0
    return first
