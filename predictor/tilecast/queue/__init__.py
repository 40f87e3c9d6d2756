"""Every job of a cluster at once: which pool and count each one is given, and when it starts and ends by that.

`problem` holds the values, `timeline` starts jobs as Kueue does, `policies` say what is best, `references` what is done
without advice, `relaxation` bounds what any plan can reach, `solver` finds a plan, `totals` say what it means, and
`options` reads jobs and pools into a problem.

What is chosen is the option of each job. In which order jobs start is Kueue's affair, and is simulated: by priority,
then by arrival; a job that does not fit lets later ones pass (`BestEffortFIFO`). What runs is never preempted.
"""
