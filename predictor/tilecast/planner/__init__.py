"""Advice for all jobs of a cluster at once: the pool and GPU count of each job, and its start and end under that plan.

`problem` holds the values, `timeline` simulates how Kueue starts jobs, `policies` defines what is best, `references`
places jobs without advice, `relaxation` bounds what any plan can reach, `solver` finds a plan, `totals` summarizes it,
and `options` turns jobs and pools into a problem. Read `problem` first.

A plan chooses one option for each job. The order in which jobs start is up to Kueue and is only simulated: by priority,
then by arrival; a job that does not fit lets later ones pass (`BestEffortFIFO`). Running jobs are never preempted.
"""
