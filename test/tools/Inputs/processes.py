"""Runs a command in several processes at a time, with a cache that is empty and
then with one whose entry is damaged, and says what they had in common."""

import os
import subprocess
import sys

cache, count, command = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
programs = os.path.join(cache, "programs")
environment = dict(os.environ, COREY_CACHE_DIR=cache)


def start():
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def results(process):
    """What is computed and chosen, without times and places."""
    output = process.communicate()[0]
    if process.returncode:
        sys.exit(f"a process failed with {process.returncode}")
    return "\n".join(
        line
        for line in output.splitlines()
        if not line.startswith(("compile:", "cache:", "prepared"))
    )


for damage in (False, True):
    if damage:
        (name,) = os.listdir(programs)
        path = os.path.join(programs, name)
        with open(path, "r+b") as file:
            file.truncate(os.path.getsize(path) // 2)
    outputs = {results(process) for process in [start() for _ in range(count)]}
    files = os.listdir(programs)
    print(
        f"{count} processes, {len(outputs)} output{'s' * (len(outputs) > 1)}, "
        f"{len(files)} file{'s' * (len(files) > 1)}"
    )
last = start().communicate()[0]
print("last:", "loaded" if "cache: loaded from" in last else last)
