"""Documents in, values out: what users and clusters write, checked at the door.

`documents` reads text, `trainingjob` and `gpupool` hold the two custom resources, `nodes` turns Node objects
into pools, and `crds` writes the resource definitions from the same models. Everything here is pure on
dictionaries: no client, no clock, no network.
"""
