"""Advice for all jobs of a cluster at once: a pool and a GPU count for each job, and its forecast start and end.

`problem` defines jobs and pools, `timeline` simulates how Kueue starts jobs, and `policies` defines objectives.
`references` assigns jobs to pools without advice, `relaxation` bounds the score of any plan, and `solver` finds a plan.
`totals` sums up a plan, and `options` turns jobs and pools into a problem. Read `problem` first.

A plan chooses one option for each job: a pool and a GPU count. Kueue decides the order in which jobs start, by priority
and then by arrival, so the planner only simulates it. Later jobs may start while an earlier job does not fit
(`BestEffortFIFO`). Running jobs are never preempted.
"""
