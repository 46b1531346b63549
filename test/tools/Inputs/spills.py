"""Compiles kernels of named configurations to machine code, prints the registers
of each, and fails if one spills that is not known to, or more than it is known to.

    spills.py <corey-translate> <ptxas> [--chip=sm_90a]... [<part of a name>...]
"""

import concurrent.futures
import os
import re
import subprocess
import sys
import tempfile


# Bytes that a thread stores, with ptxas 13.0, where kernels need more than 255
# registers, or than the threads of a block leave.
KNOWN = {
    ("selective_scan-N8-f32", "selective_scan_split1x16x64"): 8,
    ("selective_scan-N16-f32", "selective_scan_split2x16x64"): 4,
    ("selective_scan-N32-f32", "selective_scan_split2x8x64"): 116,
    ("selective_scan-N64-f32", "selective_scan_split4x8x64"): 996,
    ("projection-f32", "projection_stream_8"): 4,
}
# Elements one by one, of tensors whose tokens are no neighbours in memory either.
for element in ("f32", "f16", "bf16"):
    for kernel in ("selective_scan_warp", "selective_scan_warp_outputs"):
        KNOWN["strided_scan-N16-" + element, kernel] = 184 if element == "f32" else 144
KNOWN["strided_scan-N16-f32", "selective_scan_split1x8x64"] = 144
KNOWN["strided_scan-N16-f32", "selective_scan_split2x16x64"] = 152
for chip in ("sm_90a", "sm_90"):
    KNOWN[chip, "strided_scan-N16-f16", "selective_scan_split1x8x64"] = 20
for chip in ("sm_80", "sm_86"):
    KNOWN[chip, "strided_scan-N16-f32", "selective_scan_split2x16x64_tokens"] = 4
# Between the shares of a block of threads, outside of the loops over tiles, which
# at most load what does not change there.
for chip, bounds in {
    "sm_90a": (28, 168, 64),
    "sm_80": (280, 236, 252),
    "sm_90": (308, 240, 128),
}.items():
    for states, bound in zip((64, 128, 256), bounds):
        for element in ("f16", "bf16"):
            KNOWN[chip, "ssd-N%d-%s" % (states, element), "ssd_tensor"] = bound


def tensor(shape, element):
    return "tensor<%sx%s>" % ("x".join(str(n) for n in shape), element)


def function(arguments, body, results):
    head = ", ".join("%%%s: %s" % argument for argument in arguments)
    names = ", ".join(name for name, _ in results)
    types = ", ".join(type for _, type in results)
    return "func.func @main(%s) -> (%s) {\n%s\n  return %s : %s\n}\n" % (
        head,
        types,
        body,
        names,
        types,
    )


def scan(element, states):
    """Every variant, whole and in chunks, with all that a block adds to it."""
    act, vec = tensor(["?", "?", 2048], element), tensor([2048], "f32")
    rates, bc = tensor([2048, states], "f32"), tensor(["?", "?", 1, states], element)
    state = tensor(["?", 2048, states], "f32")
    return function(
        [("u", act), ("delta", act), ("A", rates), ("B", bc), ("C", bc)]
        + [("D", vec), ("z", act), ("bias", vec), ("h0", state)],
        "  %%y, %%h = ssm.selective_scan %%u, %%delta, %%A, %%B, %%C D(%%D : %s) z(%%z : %s)\n"
        "      delta_bias(%%bias : %s) initial_state(%%h0 : %s)\n"
        "      {delta_softplus, chunk = #ssm.chunk<runtime = @scan>}\n"
        "      : %s, %s, %s, %s, %s -> %s, %s"
        % (vec, act, vec, state, act, act, rates, bc, bc, act, state),
        [("%y", act), ("%h", state)],
    )


def ssd(element, states):
    x, dt = tensor(["?", "?", 8, 64], element), tensor(["?", "?", 8], element)
    bc, vec = tensor(["?", "?", 1, states], element), tensor([8], "f32")
    state = tensor(["?", 8, 64, states], "f32")
    return function(
        [("x", x), ("dt", dt), ("A", vec), ("B", bc), ("C", bc), ("D", vec)]
        + [("bias", vec), ("s0", state)],
        "  %%y, %%s = ssm.ssd %%x dt(%%dt : %s) A(%%A : %s) B(%%B) C(%%C) D(%%D : %s)\n"
        "      dt_bias(%%bias : %s) initial_states(%%s0 : %s)\n"
        "      {dt_softplus, chunk = #ssm.chunk<runtime = @ssd>}\n"
        "      : %s, %s, %s -> %s, %s"
        % (dt, vec, vec, vec, state, x, bc, bc, x, state),
        [("%y", x), ("%s", state)],
    )


def ssd_step(element, state_element, states):
    """One token, with the states in a pool and all that there can be."""
    x, dt = tensor(["?", 1, 8, 64], element), tensor(["?", 1, 8], element)
    bc, vec = tensor(["?", 1, 2, states], element), tensor([8], "f32")
    skip, slots = tensor([8, 64], "f32"), tensor(["?"], "i32")
    state = tensor(["?", 8, 64, states], state_element)
    return function(
        [("x", x), ("dt", dt), ("A", vec), ("B", bc), ("C", bc), ("D", skip)]
        + [("z", x), ("bias", vec), ("s0", state), ("slots", slots)],
        "  %%y, %%s = ssm.ssd %%x dt(%%dt : %s) A(%%A : %s) B(%%B) C(%%C) D(%%D : %s)\n"
        "      z(%%z : %s) dt_bias(%%bias : %s) initial_states(%%s0 : %s) slots(%%slots : %s)\n"
        "      {dt_softplus, dt_limit = array<f64: 0.001, 0.1>}\n"
        "      : %s, %s, %s -> %s, %s"
        % (dt, vec, skip, x, vec, state, slots, x, bc, bc, x, state),
        [("%y", x), ("%s", state)],
    )


def scan_step(element, state_element, states):
    act, vec = tensor(["?", 1, 2048], element), tensor([2048], "f32")
    rates, bc = tensor([2048, states], "f32"), tensor(["?", 1, 1, states], element)
    state, slots = tensor(["?", 2048, states], state_element), tensor(["?"], "i32")
    return function(
        [("u", act), ("delta", act), ("A", rates), ("B", bc), ("C", bc), ("D", vec)]
        + [("z", act), ("bias", vec), ("h0", state), ("slots", slots)],
        "  %%y, %%h = ssm.selective_scan %%u, %%delta, %%A, %%B, %%C D(%%D : %s) z(%%z : %s)\n"
        "      delta_bias(%%bias : %s) initial_state(%%h0 : %s) slots(%%slots : %s)\n"
        "      {delta_softplus} : %s, %s, %s, %s, %s -> %s, %s"
        % (vec, act, vec, state, slots, act, act, rates, bc, bc, act, state),
        [("%y", act), ("%h", state)],
    )


def conv(element):
    act, weight, bias = (
        tensor(["?", "?", 2048], element),
        tensor([2048, 4], element),
        tensor([2048], element),
    )
    return function(
        [("x", act), ("w", weight), ("b", bias)],
        "  %%y = ssm.causal_conv %%x, %%w bias(%%b : %s) {silu} : %s, %s -> %s"
        % (bias, act, weight, act),
        [("%y", act)],
    )


def norm(element):
    act, weight = tensor(["?", "?", 2048], element), tensor([2048], "f32")
    return function(
        [("x", act), ("w", weight)],
        "  %%y = ssm.rms_norm %%x, %%w : %s, %s -> %s" % (act, weight, act),
        [("%y", act)],
    )


def hadamard(element):
    act = tensor(["?", "?", 2048], element)
    return function(
        [("x", act)],
        "  %%y = ssm.hadamard %%x {block = 1024 : i64} : %s -> %s" % (act, act),
        [("%y", act)],
    )


def rotated_norm(element):
    """With all there can be before, between and behind the two."""
    act, weight = tensor(["?", "?", 5120], element), tensor([5120], "f32")
    return function(
        [("x", act), ("w", weight), ("r", act), ("z", act), ("g", act)],
        "  %%n, %%s = ssm.rms_norm %%x, %%w residual(%%r : %s) z(%%z : %s) {norm_before_gate}\n"
        "      : %s, %s -> %s, %s\n"
        "  %%m = ssm.mul %%n, %%g : %s, %s\n"
        "  %%h = ssm.hadamard %%m {block = 1024 : i64} : %s -> %s\n"
        "  %%y = ssm.add %%h, %%x : %s, %s"
        % (act, act, act, weight, act, act, act, act, act, act, act, act),
        [("%y", act), ("%s", act)],
    )


def projection(element):
    x, w, y = (
        tensor(["?", "?", 2048], element),
        tensor([1024, 2048], element),
        tensor(["?", "?", 1024], element),
    )
    return function(
        [("x", x), ("w", w), ("r", y)],
        "  %%y = ssm.projection %%x, %%w residual(%%r : %s) : %s, %s -> %s"
        % (y, x, w, y),
        [("%y", y)],
    )


def sample(element):
    """The vocabulary of the published Mambas: a cluster for a row where there is one."""
    real, count = tensor(["?"], "f32"), tensor(["?"], "i32")
    random = tensor(["?", 3], "i64")
    logits = tensor(["?", 50280], element)
    types = "%s, %s, %s, %s, %s" % (logits, real, count, real, random)
    return function(
        [("x", logits), ("t", real), ("k", count), ("p", real), ("r", random)],
        "  %%y:2 = ssm.sample %%x, %%t, %%k, %%p, %%r : %s -> %s, %s"
        % (types, count, random),
        [("%y#0", count), ("%y#1", random)],
    )


def strided(program):
    """Tokens as the neighbours in memory: what is of every token has any strides."""
    head, rest = program.split("\n", 1)
    of_tokens = r"(tensor<\?x\?x[^>]*>)"
    head = re.sub(r"(%\w+: )" + of_tokens, r"\1\2 {ssm.any_strides}", head)
    head = re.sub(r"-> \(" + of_tokens, r"-> (\1 {ssm.any_strides}", head)
    return head + "\n" + rest


def configurations():
    for element in ("f32", "f16", "bf16"):
        for states in (8, 16, 32, 64):
            yield "selective_scan-N%d-%s" % (states, element), scan(element, states)
        for states in (64, 128, 256):
            yield "ssd-N%d-%s" % (states, element), ssd(element, states)
        for state in ("f32", "bf16"):
            for states in (16, 64, 128, 256):
                name = "N%d-%s-%s" % (states, state, element)
                yield "ssd_step-" + name, ssd_step(element, state, states)
            yield "scan_step-N16-%s-%s" % (state, element), scan_step(element, state, 16)
        for emit in (conv, norm, hadamard, rotated_norm, projection, sample):
            yield "%s-%s" % (emit.__name__, element), emit(element)
        yield "strided_scan-N16-" + element, strided(scan(element, 16))
        yield "strided_conv-" + element, strided(conv(element))


def compile(translate, ptxas, chip, name, program):
    """Kernels with their registers and spilled bytes."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, name)
        with open(path + ".mlir", "w") as file:
            file.write(program)
        subprocess.run(
            [translate, path + ".mlir", "--to=ptx", "--chip=" + chip, "-o", path + ".ptx"],
            check=True,
        )
        log = subprocess.run(
            [ptxas, "-v", "-arch=" + chip, path + ".ptx", "-o", path + ".cubin"],
            check=True,
            capture_output=True,
            text=True,
        ).stderr
    # What the assembler says of products that it does not let overlap.
    for line in log.splitlines():
        if re.search(r"\(C75\d\d\)", line):
            sys.exit("%s %s: FAIL, %s" % (chip, name, line))
    return re.findall(
        r"Compiling entry function '(\S+)'.*?(\d+) bytes spill stores.*?Used (\d+) registers",
        log,
        re.DOTALL,
    )


def main(translate, ptxas, *rest):
    chips = [a.split("=")[1] for a in rest if a.startswith("--chip=")]
    wanted = [a for a in rest if not a.startswith("--")]
    work = [
        (chip, name, program)
        for chip in chips or ["sm_90a"]
        for name, program in configurations()
        if all(part in name for part in wanted)
    ]
    failed = kernels = 0
    asked = {(chip, name) for chip, name, _ in work}
    # Of all chips, or of one.
    unseen = {
        key
        for key in KNOWN
        if (key[:2] in asked if len(key) == 3 else any(name == key[0] for _, name in asked))
    }
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        results = pool.map(lambda item: compile(translate, ptxas, *item), work)
        for (chip, name, _), found in zip(work, results):
            # A log in another form than the one read here must not pass.
            if not found:
                sys.exit("%s %s: expected kernels in ptxas's log, got none" % (chip, name))
            for kernel, spilled, registers in found:
                kernels += 1
                key = (chip, name, kernel)
                if key not in KNOWN:
                    key = (name, kernel)
                bound = KNOWN.get(key, 0)
                line = "%s %s %s: %s registers" % (chip, name, kernel, registers)
                if spilled != "0":
                    unseen.discard(key)
                    line += ", %s bytes spilled" % spilled
                if int(spilled) > bound:
                    failed += 1
                    line += ": FAIL, expected at most %d" % bound
                print(line)
    for key in sorted(unseen):
        failed += 1
        print("%s: FAIL, expected a kernel that spills, got none" % " ".join(key))
    print("%d kernels, %d failed" % (kernels, failed))
    return failed != 0


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
