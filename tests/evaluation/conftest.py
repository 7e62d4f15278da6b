import os

# ranx compiles its metrics on first use, for two minutes; in plain Python they take milliseconds here.
# Read once, when numba is first imported; nothing else here uses numba.
os.environ["NUMBA_DISABLE_JIT"] = "1"
