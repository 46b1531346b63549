"""Replaces the dialect version in MLIR bytecode: <old> <new>, stdin to stdout.

A dialect version is a section of its own (number 7), which holds the two parts
as variable-length integers; those below 128 take one byte, 2 n + 1.
"""

import sys


def section(version):
    parts = bytes(2 * int(part) + 1 for part in version.split("."))
    return bytes([7, 2 * len(parts) + 1]) + parts


old, new = map(section, sys.argv[1:3])
data = sys.stdin.buffer.read()
if data.count(old) != 1:
    sys.exit(f"expected version {sys.argv[1]} once, got it {data.count(old)} times")
sys.stdout.buffer.write(data.replace(old, new))
