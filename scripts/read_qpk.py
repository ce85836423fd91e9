#!/usr/bin/env python3
"""Reader of qpk files in plain Python, written from docs/formats/qpk.md: a second opinion on libqpk.
usage: read_qpk.py FILE          metadata, CRC-32 of each side file and of each tensor's float32 values (aliases too)
       read_qpk.py FILE NAME     values of one tensor, a row per line
"""
import math, struct, sys, zlib

data = open(sys.argv[1], "rb").read()


def get(fmt, at):
    return struct.unpack_from("<" + fmt, data, at)


def records(section, n_bytes):
    return range(section[0], section[0] + section[1], n_bytes)


def name(at):
    start, n_bytes = get("II", at)
    return data[strings[0] + start:strings[0] + start + n_bytes].decode()


def meta(kind, count, value, at):
    if kind == 4:
        return data[strings[0] + value:strings[0] + value + count].decode()
    fmt = {1: "Q", 2: "q", 3: "d"}[kind % 16]
    return get(fmt, at)[0] if kind < 16 else list(get("%d%s" % (count, fmt), values[0] + value))


def floats(dtype, at, n):
    if dtype == 3:  # BF16 is the upper half of F32
        return struct.unpack("<%df" % n, b"".join(struct.pack("<I", x << 16) for x in get("%dH" % n, at)))
    return get("%d%s" % (n, {1: "f", 2: "e", 4: "d", 5: "b", 6: "B", 7: "h", 8: "H", 9: "i", 13: "?"}[dtype]), at)


def code(tile, bits, r, c):
    step, value, low = c % 32 // 4, 0, 0
    for w in (w for w in (8, 4, 2, 1) if bits & w):
        at = tile + 64 * (bits * (c // 32) + low + step // (8 // w)) + 4 * r + c % 4
        value |= (data[at] >> w * (step % (8 // w)) & (1 << w) - 1) << low
        low += w
    return value


def rows(at):
    dtype, n_dims, _, crc, *shape, offset, n_bytes = get("HBBI4QQQ", at + 8)
    assert zlib.crc32(data[offset:offset + n_bytes]) == crc, name(at)
    n_rows, cols = math.prod(shape[:max(n_dims - 1, 0)]), shape[n_dims - 1] if n_dims else 1
    _, bits, _, flags, stype, _, group, tile_bytes, scales, zeros = get("BBBBHHQQQQ", at + 64)
    for row in range(n_rows):
        if dtype != 64:
            yield floats(dtype, offset + n_bytes // n_rows * row, cols)
            continue
        tile, r, line = offset + row // 16 * tile_bytes, row % 16, []
        for c in range(cols):
            i = 16 * (c // group) + r
            scale = floats(stype, tile + scales + i * (4 if stype == 1 else 2), 1)[0]
            line.append(scale * (code(tile, bits, r, c) - (data[tile + zeros + i] if flags else 1 << bits - 1)))
        yield line


assert data[:8] == b"\x89QPK\r\n\x1a\n" and get("IIQ", 8) == (0, 256, 0) and get("I", 252)[0] == zlib.crc32(data[:252])
sections = [get("QQII", 48 + 24 * i) for i in range(8)]
assert get("Q", 32)[0] == len(data) and all(zlib.crc32(data[o:o + n]) == crc for o, n, _, crc in sections[2:])
strings, metas, values, files, tensors, aliases = sections[2:]
places = {name(at): at for at in records(tensors, 192)}
places.update((name(at), tensors[0] + 192 * get("I", at + 8)[0]) for at in records(aliases, 16))
for line in rows(places[sys.argv[2]]) if len(sys.argv) > 2 else ():
    print(*line)
for at in records(metas, 32) if len(sys.argv) == 2 else ():
    print("meta", name(at), meta(*get("IIQ", at + 8), at + 16))
for at in records(files, 48) if len(sys.argv) == 2 else ():
    method, crc, _, stored, offset = get("IIQQQ", at + 8)
    text = data[offset:offset + stored]
    assert zlib.crc32(text) == crc, name(at)
    print("file", name(at), "%08x" % zlib.crc32(zlib.decompress(text) if method else text))
for key, at in places.items() if len(sys.argv) == 2 else ():
    print("tensor", key, "%08x" % zlib.crc32(b"".join(struct.pack("<%df" % len(r), *r) for r in rows(at))))
