"""An order for the summands of straight-line programs in which few values are live at once.

A value is live from its first summand to its last use, an input from the beginning. Gradients are sums of many products
of values that are made far apart: added up product by product as those come, they keep one number alive where whole
sums, one after another, keep all their factors. For 0e+1o, the gradients of a gradient have 115 live values instead
of 209, and kernels take registers accordingly.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

Place = tuple[int, int]
"""A value and the number of one of its summands."""
Values = Mapping[int, Sequence[tuple]]
"""Values that are sums, of summands (c, a) or (c, a, b); others that these read are inputs."""


def few_live(values: Values, outputs: Collection[int], on_demand: Collection[int]) -> list[Place]:
    """All summands, each after what it is made of: the best of three greedy orders, none of which is best for all.

    Args:
        values: each after those it is made of. Most orders prefer late ones, whose factors have been made by then.
        outputs: values live to the end.
        on_demand: inputs live from their first use.
    """
    late = {v: -place for place, v in enumerate(values)}
    first_made = {v: v for v in values}
    rules = ((late, True), (late, False), (first_made, False))
    orders = [_greedy(values, {*outputs, *on_demand}, rank, patient) for rank, patient in rules]
    return min(orders, key=lambda order: most_live(values, order, outputs, on_demand))


def most_live(
    values: Values, order: Sequence[Place], outputs: Collection[int] = (), on_demand: Collection[int] = ()
) -> int:
    """The largest number of values that are live at once."""
    touched = [{v, *values[v][i][1:]} for v, i in order]
    last = {v: step for step, some in enumerate(touched) for v in some}
    live = {v for v in last if v not in values and v not in on_demand}
    most = 0
    for step, some in enumerate(touched):
        live |= some
        most = max(most, len(live))
        live -= {v for v in some if last[v] == step and v not in outputs}
    return most


def _greedy(values: Values, lasting: Collection[int], rank: Mapping[int, int], patient: bool) -> list[Place]:
    """Take next what ends more live values than others, or begins fewer; among those the value of lowest rank.

    With `patient`, among values not begun, first one whose summands wait for fewest other values. Ends of `lasting`
    values do not count: outputs live on, and inputs that are loaded on demand are no reason to hurry.
    """
    reads = {(v, i): set(summand[1:]) for v, value in values.items() for i, summand in enumerate(value)}
    readers: dict[int, list[Place]] = {}
    for place, read in reads.items():
        for a in read:
            readers.setdefault(a, []).append(place)
    unread = {a: len(places) for a, places in readers.items()}
    unmade = {place: sum(a in values for a in read) for place, read in reads.items()}
    waiting = Counter(v for (v, _), count in unmade.items() if count)
    left = {v: len(value) for v, value in values.items()}
    begun: set[int] = set()
    done: set[Place] = set()
    queue: list[tuple[tuple[int, int, int], Place]] = []

    def key(place: Place) -> tuple[int, int, int]:
        v = place[0]
        ends = sum(unread[a] == 1 and a not in lasting for a in reads[place])
        return (v not in begun) - ends, waiting[v] if patient and v not in begun else 0, rank[v]

    def offer(places: Sequence[Place]) -> None:
        for place in places:
            if not unmade[place] and place not in done:
                heapq.heappush(queue, (key(place), place))

    offer(list(reads))
    order: list[Place] = []
    while queue:
        was, place = heapq.heappop(queue)
        if place in done or was != key(place):  # offered again since
            continue
        v = place[0]
        order.append(place)
        done.add(place)
        left[v] -= 1
        changed: set[int] = set() if v in begun else {v}
        begun.add(v)
        for a in reads[place]:
            unread[a] -= 1
            if unread[a] == 1:
                offer(readers[a])
        if not left[v]:
            for reader in readers.get(v, ()):
                unmade[reader] -= 1
                if not unmade[reader]:
                    waiting[reader[0]] -= 1
                    changed.add(reader[0])
        for u in changed:
            offer([(u, i) for i in range(len(values[u]))])
    return order
