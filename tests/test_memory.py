import subprocess
import sys

from fedhur_app.memory import peak_memory_mib

CODE = """
from fedhur_app.memory import peak_memory_mib
before = peak_memory_mib()
block = bytearray(200 * 2**20)
del block
print(peak_memory_mib() - before)
"""


def test_the_peak_stays_when_the_memory_is_gone_and_is_the_process_own():
    block = bytearray(400 * 2**20)
    grown = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert 190 < float(grown.stdout) < 250
    assert peak_memory_mib() > 400
    del block
