#!/usr/bin/env python3
"""Reference vectors of round-to-nearest quantization, from the formulas of docs/methods/rtn.md in float64 (numpy only).

usage: gen_quant_vectors.py tests/data/quant/rtn.txt

Scales are computed in float32, as the formulas demand, and rounded to the stored type by numpy; codes are
round(w / s) in float64 with the stored scale. Rows with a quotient within 1e-5 of a half step are drawn again, so
that every correct program gives the same codes; the rows of matrix 'ties' are exact halves on purpose.

Lines of the file (hexadecimal words are bit patterns of float32, most significant digit first):
  matrix NAME ROWS COLS, then one line of words per row
  case MATRIX BITS RULE GROUP DTYPE, then per row: scales as words; zeros in decimal ('-' if symmetric); codes as hex bytes
  best MATRIX BITS RULE GROUP, then one number: the least squared error that a dense search over scales (F32, not
       rounded) and all zeros finds, summed over the matrix
"""
import sys

import numpy as np

F = np.float32


def stored(s, dtype):
    """s (float32) rounded to nearest even in the stored type, as float32."""
    if dtype == "F16":
        return F(np.float16(s))
    if dtype == "BF16":
        u = int(F(s).view(np.uint32))
        keep, rest = u >> 16, u & 0xFFFF
        if rest > 0x8000 or (rest == 0x8000 and keep & 1):
            keep += 1
        return np.uint32(keep << 16).view(F)
    return F(s)


def grid_of(x, bits, rule, dtype):
    """Stored scale and zero of one group by the min-max rule."""
    half, qmax = 2 ** (bits - 1), 2**bits - 1
    lo, hi = min(x.min(), F(0)), max(x.max(), F(0))
    if lo == hi:
        return F(1), 0 if rule == "asym" else half
    largest = hi if hi >= -lo else lo
    if rule == "asym":
        s = stored(F(F(hi - lo) / F(qmax)), dtype)
        return s, int(np.clip(np.rint(-F(lo) / s), 0, qmax))
    s = {"full": F(largest) / F(-half), "half": F(abs(largest)) / F(qmax / 2), "narrow": F(abs(largest)) / F(half - 1)}[rule]
    return stored(F(s), dtype), half


def codes_of(x, s, z, bits):
    q = x.astype(np.float64) / np.float64(s)
    return np.clip(np.rint(q) + z, 0, 2**bits - 1).astype(int), np.abs(np.abs(q - np.floor(q)) - 0.5).min()


def groups(cols, group):
    return [(c, min(c + group, cols)) for c in range(0, cols, group)]


def hexes(v):
    return " ".join("%08x" % int(u) for u in np.asarray(v, F).view(np.uint32))


def case(out, name, w, bits, rule, group, dtype):
    lines = []
    for row in w:
        scales, zeros, codes = [], [], []
        for a, b in groups(len(row), group):
            s, z = grid_of(row[a:b], bits, rule, dtype)
            q, margin = codes_of(row[a:b], s, z, bits)
            if name != "ties" and margin < 1e-5:
                return False
            scales.append(s)
            zeros.append(z)
            codes += list(q)
        lines += [hexes(scales), " ".join(map(str, zeros)) if rule == "asym" else "-", "".join("%02x" % q for q in codes)]
    out.append("case %s %d %s %d %s" % (name, bits, rule, group, dtype))
    out += lines
    return True


def best_error(x, bits, rule):
    """Least sum of squared errors over 4000 scales (both signs) and all zeros."""
    x = x.astype(np.float64)
    half, qmax = 2 ** (bits - 1), 2**bits - 1
    span = max(x.max(), 0) - min(x.min(), 0) if rule == "asym" else np.abs(x).max() * 2
    best = np.inf
    for s in np.linspace(0.2, 2.2, 4000) * span / qmax:
        for sz in [(s, z) for z in range(qmax + 1)] if rule == "asym" else [(s, half), (-s, half)]:
            e = x - sz[0] * (np.clip(np.rint(x / sz[0]) + sz[1], 0, qmax) - sz[1])
            best = min(best, (e * e).sum())
    return best


def matrices(rng):
    gauss = (rng.standard_normal((3, 64)) * 0.02).astype(F)
    heavy = (rng.standard_t(3, (3, 64)) * 0.05).astype(F)
    heavy[1, 5] = 3.0
    mixed = (rng.standard_normal((4, 64))).astype(F)
    mixed[0] = np.abs(mixed[0]) + F(10.5)  # one-sided, positive
    mixed[1] = -np.abs(mixed[1]) - F(2)    # one-sided, negative
    mixed[2, 16:32] = 0                    # an empty group
    mixed[3] *= F(1e-3)
    return {"gauss": gauss, "heavy": heavy, "mixed": mixed}


def all_cases(out, name, w):
    dtypes, i = ["F16", "BF16", "F32"], 0
    for bits in range(2, 9):
        for rule in ("asym", "full", "half", "narrow"):
            for group in (16, 24, 64):
                # the half-step rule puts the largest value on a half exactly if its scale is not rounded
                dtype = dtypes[i % (2 if rule == "half" else 3)]
                if not case(out, name, w, bits, rule, group, dtype):
                    return False
                i += 1
            i += 1
    return True


def main():
    rng = np.random.default_rng(3)
    out = ["# made by scripts/gen_quant_vectors.py with numpy " + np.__version__]
    for name in ("gauss", "heavy", "mixed"):
        while True:
            w, body = matrices(rng)[name], []
            if all_cases(body, name, w):
                break
        out.append("matrix %s %d %d" % (name, *w.shape))
        out += [hexes(r) for r in w] + body
    # halves: full range with 8 steps of 1/4 at the largest value -2 (4 bit), and steps of 1/128 at -1 (8 bit)
    ties = np.zeros((2, 16), F)
    ties[0] = [-2, -1.875, -1.625, -1.375, -1.125, -0.875, -0.625, -0.375, -0.125, 0.125, 0.375, 0.625, 0.875, 1.125, 1.375, 1.625]
    ties[1] = [-1] + [(k + 0.5) / 128 for k in (-100, -99, -50, -2, -1, 0, 1, 2, 3, 49, 50, 125, 126)] + [0.5, 0.25]
    out.append("matrix ties 2 16")
    out += [hexes(r) for r in ties]
    case(out, "ties", ties, 4, "full", 16, "F16")
    case(out, "ties", ties, 8, "full", 16, "F16")
    for bits, rule in ((2, "full"), (3, "full"), (4, "full"), (2, "asym"), (3, "asym"), (4, "asym")):
        w = rng.standard_normal((4, 32)).astype(F)
        name = "search%d%s" % (bits, rule)
        out.append("matrix %s 4 32" % name)
        out += [hexes(r) for r in w]
        out.append("best %s %d %s 32" % (name, bits, rule))
        out.append("%.9g" % sum(best_error(r, bits, rule) for r in w))
    with open(sys.argv[1], "w") as f:
        f.write("\n".join(out) + "\n")


if __name__ == "__main__":
    main()
