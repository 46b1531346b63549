"""Checks the examples in ODS descriptions.

Reads the JSON dump of llvm-tblgen from standard input.

Of ops and attributes it makes one module, on standard output: a function for
every ```mlir block, the values it uses but does not define being arguments of
the types that the example gives them. Attributes give their examples inline, as
`#ssm...`; they become attributes of a function. Fails where an op or an
attribute has no example.

Of passes, with `--passes <empty folder>`, it runs each example: between two
```mlir blocks stands "becomes", or "becomes, with `<options>`", and corey-opt must
make the second of the first. A ```json block between them is written to the file
that the options name. Fails, with the difference, where what comes out is
something else, or where a pass on ssm ops has no example.
"""

import difflib
import json
import os
import re
import subprocess
import sys

OPENING, CLOSING = "([{<", ")]}>"


def split_top(text, separator):
    """Splits at every separator that is outside of brackets and strings."""
    parts, depth, start, quoted, i = [], 0, 0, False, 0
    while i < len(text):
        c = text[i]
        if c == '"':
            quoted = not quoted
        elif not quoted and text.startswith(separator, i) and depth == 0:
            parts.append(text[start:i])
            start = i = i + len(separator)
            continue
        elif not quoted and text.startswith("->", i):
            i += 1
        elif not quoted and c in OPENING:
            depth += 1
        elif not quoted and c in CLOSING:
            depth -= 1
        i += 1
    return parts + [text[start:]]


def groups(text):
    """Yields the keyword before and the contents of every outer `(...)`."""
    for match in re.finditer(r"(\w[\w.]*) ?\(", text):
        depth, end = 1, match.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        yield match.group(1), text[match.end() : end - 1]


def operand_types(op):
    """The types of the operands of one op, as far as its text gives them."""
    types = {}
    *head, tail = split_top(op, " : ")
    head = " : ".join(head)
    for keyword, contents in groups(head or op):
        values = re.findall(r"%\w+", contents)
        if " : " in contents:
            given = split_top(contents.split(" : ", 1)[1], ",")
            types.update(zip(values, (t.strip() for t in given)))
        elif keyword == "chunk_size" or "bind_chunk" in op:
            types.update((value, "index") for value in values)
    rest = [v for v in re.findall(r"%\w+", head) if v not in types]
    given = split_top(re.split(r" -> | to ", tail)[0], ",")
    types.update(zip(rest, (t.strip() for t in given)))
    return types


def wrap(name, example):
    """An example as a function, or as is where it declares a symbol."""
    body, defined, arguments = [], set(), {}
    # An op may span lines, and so do the regions that it holds.
    for op in re.split(r"\n(?![ ^}])", example):
        results, _, text = op.partition(" = ") if op.startswith("%") else ("", "", op)
        header = " ".join(text.split("{\n")[0].split())
        for value, type in operand_types(header).items():
            if value not in defined:
                arguments.setdefault(value, type)
        defined.update(re.findall(r"%\w+", results))
        body.append(op)
    if example.startswith("ssm.weight "):
        return example
    signature = ", ".join(f"{v}: {t}" for v, t in arguments.items())
    lines = "\n".join("  " + line for line in "\n".join(body).split("\n"))
    weight = re.search(r"ssm.get_weight (@\w+) : (\S+)", example)
    declaration = f"ssm.weight {weight[1]} : {weight[2]}\n" if weight else ""
    if declaration and any(e.startswith(declaration.split(" :")[0]) for e in declared):
        declaration = ""
    return f"{declaration}func.func @{name}({signature}) {{\n{lines}\n  return\n}}"


def dedent(text):
    lines = text.strip("\n").split("\n")
    margin = min(len(l) - len(l.lstrip()) for l in lines if l.strip())
    return "\n".join(l[margin:] for l in lines).strip()


def opt(folder, name, *arguments):
    """The module in a file after corey-opt, as lines."""
    command = ["corey-opt", name, *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode or done.stderr:
        sys.exit(f"{' '.join(command)}:\n{done.stderr}")
    # Pages give numbers to four digits.
    number = r"(?<![\w.])-?\d+\.\d+(e[-+]\d+)?"
    return [
        re.sub(number, lambda n: f"{float(n[0]):.4g}", line)
        for line in done.stdout.splitlines()
    ]


def check_passes(records, folder):
    wrong, missing = 0, []
    for record in sorted(records["!instanceof"]["PassBase"]):
        name = records[record]["argument"]
        # Prose and blocks take turns.
        parts = re.split(r"```(\w*)\n(.*?)```", records[record]["description"] or "", flags=re.S)
        before, prose, shown = None, "", 0
        for i in range(0, len(parts) - 1, 3):
            prose += parts[i]
            language, block = parts[i + 1], dedent(parts[i + 2])
            made = re.search(r"becomes(?:, with `([^`]*)`[^`]*)?,?\s*$", prose.rstrip())
            options = made and made[1] or ""
            if language == "json":
                with open(os.path.join(folder, re.search(r"\w+\.json", options)[0]), "w") as file:
                    file.write(block)
                continue
            if language != "mlir":
                sys.exit(f"{name}: expected a block of mlir or json, got '{language}'")
            if bool(made) != bool(before):
                sys.exit(f"{name}: expected two mlir blocks with 'becomes' between, got one")
            file = f"{name}.{shown}.{'after' if made else 'before'}.mlir"
            with open(os.path.join(folder, file), "w") as out:
                out.write(block + "\n")
            prose = ""
            if not made:
                before = file
                continue
            expected = opt(folder, file)
            got = opt(folder, before, f"--{name}={options}")
            example = f"{name} {options}".strip()
            if opt(folder, before) == expected:
                sys.exit(f"{example}: expected an example of a change, got none")
            difference = list(difflib.unified_diff(expected, got, file, example, lineterm=""))
            print(f"{'FAIL' if difference else 'PASS'} {example}", *difference, sep="\n")
            wrong += bool(difference)
            before, shown = None, shown + 1
        if before:
            sys.exit(f"{name}: expected two mlir blocks with 'becomes' between, got one")
        if not shown and "ssm" in name:
            missing.append(name)
    if missing:
        sys.exit("expected an example of every pass on ssm ops, got none of " + ", ".join(missing))
    sys.exit(wrong and f"{wrong} wrong")


records = json.load(sys.stdin)
if sys.argv[1:2] == ["--passes"]:
    check_passes(records, sys.argv[2])

examples, terminators, missing = {}, set(), []
for record in sorted(records["!instanceof"]["Op"]):
    op = records[record]
    if op["opDialect"]["def"] != "SSM_Dialect":
        continue
    # A terminator is shown by the op that it ends.
    if any(trait["def"] == "Terminator" for trait in op["traits"]):
        terminators.add(op["opName"])
    blocks = re.findall(r"```mlir\n(.*?)```", op["description"], re.S)
    examples[op["opName"]] = [dedent(block) for block in blocks]

everything = "\n".join(e for blocks in examples.values() for e in blocks)
declared = [e for blocks in examples.values() for e in blocks if e.startswith("ssm.weight ")]
for name, blocks in examples.items():
    shown = everything if name in terminators else "\n".join(blocks)
    if not re.search(rf"\bssm\.{name}\b", shown):
        missing.append(f"ssm.{name}")
    for i, block in enumerate(blocks):
        print(f"\n// ssm.{name}\n{wrap(f'{name}_{i}', block)}")

for record in sorted(records["!instanceof"]["AttrDef"]):
    attribute = records[record]
    mnemonic = attribute["mnemonic"]
    shown = re.findall(rf"`(#ssm\.{mnemonic}<[^`]*>)`", attribute["description"] or "")
    # The values of an enumeration are keywords of the ops that take them.
    if not shown and "granularity" not in mnemonic:
        missing.append(f"#ssm.{mnemonic}")
    for i, example in enumerate(shown):
        name = f"attribute_{mnemonic}_{i}"
        print(f"\nfunc.func private @{name}() attributes {{test.example = {example}}}")

if missing:
    sys.exit("expected an example of every op and attribute, got none of " + ", ".join(missing))
