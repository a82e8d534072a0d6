"""llama.cpp's own HTTP server, as the package xllamacpp brings it: serve.py MODEL.gguf [NAME=VALUE…]. Prints its address."""

import signal
import sys

import xllamacpp

parameters = xllamacpp.CommonParams()
parameters.model.path = sys.argv[1]
parameters.n_ctx = 16384
parameters.n_parallel = 4
parameters.cpuparams.n_threads = 1
parameters.cpuparams_batch.n_threads = 1
parameters.warmup = False
parameters.port = 0
for setting in sys.argv[2:]:
    name, value = setting.split("=")
    setattr(parameters, name, int(value))
server = xllamacpp.Server(parameters)
print(server.listening_address, flush=True)
signal.pause()
