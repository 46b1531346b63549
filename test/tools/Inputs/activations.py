"""Writes three safetensors files: spikes, a NaN, and nothing in floating point."""

import json
import struct
import sys


def write(path, dtype, code, rows):
    data = b"".join(struct.pack("<%d%s" % (len(row), code), *row) for row in rows)
    header = json.dumps(
        {
            "text.layer0.u": {
                "dtype": dtype,
                "shape": [len(rows), len(rows[0])],
                "data_offsets": [0, len(data)],
            }
        }
    ).encode()
    header += b" " * (-len(header) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header + data)


spikes = [[7.0 if i == j else 0.0 for j in range(12)] for i in range(12)]
write(sys.argv[1], "F16", "e", spikes)
spikes[3][4] = float("nan")
write(sys.argv[2], "F16", "e", spikes)
write(sys.argv[3], "I32", "i", [[1, 2], [3, 4]])
