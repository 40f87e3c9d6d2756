"""Read the inputs of users: jobs, pools, measured steps and queues.

Read `job` first. It converts every supported description of a job to a TrainingJob document.
"""
