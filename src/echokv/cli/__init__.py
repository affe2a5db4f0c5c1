"""The `echokv` command line, one module a command."""

import os

# Before torch brings OpenMP in: threads that spin while another process needs the core made the
# model forty times slower on two busy cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
