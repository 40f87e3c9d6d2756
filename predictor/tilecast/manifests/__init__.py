"""Documents in, values out: what users and clusters write, checked at the door.

`documents` reads text, `trainingjob` and `gpupool` hold the two custom resources, `nodes` turns Node objects
into pools. `jobs` reads the jobs of Kubernetes, Kubeflow and JobSet, `kueue` the queues they wait in, `candidates` says
which pools that leaves, and `edit` changes a manifest's text. `crds` writes the resource definitions from the same
models. Everything here is pure on dictionaries: no client, no clock, no network.
"""
