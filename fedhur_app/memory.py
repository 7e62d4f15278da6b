"""How much memory a process has needed."""

import sys
from pathlib import Path


def peak_memory_mib() -> float | None:
    """Largest resident memory of this process so far, in MiB; None where the system does not tell.

    Pages of files that are mapped into memory count while they are resident, although the system can take them back.
    """
    try:
        # Not getrusage: there a process begins with the peak of the one that started it.
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 2**10
    except OSError:
        pass
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)
