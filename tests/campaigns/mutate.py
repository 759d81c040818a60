"""Hostile bytes made from good ones: torn, cut, flipped, and JSON with values that nobody expects."""

import copy
import json
import math

SURROGATE, MARKUP = "a\ud800b", "<script>alert(1)</script>|`*[x](y)\x1b[31m"
VALUES = [None, True, False, 0, -1, 1, 2**31, 2**63, 10**400, -(10**30), 0.5, -0.5, 7.5, 1e308, 5e-324]
VALUES += [math.nan, math.inf, -math.inf, "", "x", "1", "NaN", SURROGATE, MARKUP, "x" * 5000, "evil.sub:f"]
VALUES += [[], {}, [[]], [1], {"a": 1}, [None] * 50]
RAW = ["", "{", "[", "nul", "[" * 5000, "9" * 5000, '{"a":1,"a":2}', "\x00", "\ufeff{}", "1 2", "NaN"]


def raw(content, rng):
    """The bytes with one to four changes."""
    data = bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        data = _once(data, rng)
    return bytes(data)


def _once(data, rng):
    at, size = rng.randrange(len(data) + 1), min(len(data), 1 << rng.randrange(10))
    kind = rng.randrange(8)
    if kind == 0 and data:  # one bit
        data[at % len(data)] ^= 1 << rng.randrange(8)
    elif kind == 1 and data:  # one byte
        data[at % len(data)] = rng.randrange(256)
    elif kind == 2:  # torn
        del data[at:]
    elif kind == 3:  # a part missing
        del data[at : at + size]
    elif kind == 4:  # a part twice
        data[at:at] = data[at : at + size]
    elif kind == 5:  # something in between
        data[at:at] = rng.randbytes(size)
    elif kind == 6:  # a block of zeros, as after a crash of the system
        data[at : at + size] = bytes(len(data[at : at + size]))
    else:
        data[at : at + size] = rng.randbytes(len(data[at : at + size]))
    return data


def structured(value, rng):
    """JSON as bytes, with one to three of its parts replaced, removed, doubled or renamed."""
    value = json.loads(json.dumps(value))
    for _ in range(rng.choice([1, 1, 2, 3])):
        value = _change(value, rng)
    try:
        text = json.dumps(value)
    except ValueError:  # a number of too many digits for text
        text = "9" * 5000
    if rng.random() < 0.05:
        text = rng.choice(RAW)
    return text.encode(errors="surrogatepass")


def _change(value, rng):
    """A change somewhere inside; deeper with some luck."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        name = rng.choice(list(value))
        kind = rng.random()
        if kind < 0.1:
            del value[name]
        elif kind < 0.15:
            value[rng.choice(["x", MARKUP, "__class__", "digest", "files", ""])] = value[name]
        else:
            value[name] = _change(value[name], rng)
        return value
    if isinstance(value, list) and value and rng.random() < 0.9:
        at, kind = rng.randrange(len(value)), rng.random()
        if kind < 0.1:
            del value[at]
        elif kind < 0.2:
            value.insert(at, value[at])
        else:
            value[at] = _change(value[at], rng)
        return value
    return copy.deepcopy(rng.choice(VALUES))


def tensors(content, rng):
    """A safetensors file with a changed header of the right length, or with changed bytes."""
    if rng.random() < 0.4:
        return raw(content, rng)
    size = int.from_bytes(content[:8], "little")
    header = structured(json.loads(content[8 : 8 + size]), rng)
    claimed = len(header) if rng.random() < 0.9 else rng.choice([0, 1, 2**31, 2**63 - 1, 2**64 - 1])
    return claimed.to_bytes(8, "little") + header + content[8 + size :]
