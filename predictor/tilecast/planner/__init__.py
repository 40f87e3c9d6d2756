"""Advice for all jobs of a cluster at once: a pool and a GPU count for each job, and its forecast start and end.

`problem` holds the values, `timeline` simulates how Kueue starts jobs, and `policies` defines objectives. `references`
places jobs without advice, `relaxation` bounds the result of any plan, and `solver` finds a plan. `totals` sums it up,
and `options` turns jobs and pools into a problem. Read `problem` first.

A plan chooses one option for each job. Kueue decides the order in which jobs start, so that the order is only
simulated: by priority, then by arrival. A job that does not fit lets later ones pass (`BestEffortFIFO`). Running jobs
are never preempted.
"""
