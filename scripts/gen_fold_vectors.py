#!/usr/bin/env python3
"""Reference choices of channel scales, by brute force in float64 from docs/methods/awq.md and smoothquant.md (numpy only).

usage: gen_fold_vectors.py tests/data/quant/fold.txt

Every candidate is tried on all rows: weights times s rounded to nearest with min-max scales, decoded, divided by s; the
error is taken on the tokens themselves (not through a second order matrix). Problems where two candidates come within
1 % of each other are drawn again.

Lines of the file:
  problem NAME METHOD COLS SHARE MATRICES ROWS TOKENS BITS RULE GROUP ACT_BITS ACT_GROUP GAIN
      (SHARE inputs read one channel of the producer; GAIN is -, F16 or BF16), then
  TOKENS lines x, MATRICES * ROWS lines w, one line of the gain (absent for -), all as words of float32 bits;
  choice LABEL (two words), identity LOSS, loss LOSS, scales as numbers by channel
"""
import sys

import numpy as np

F = np.float32


def hexes(v):
    return " ".join("%08x" % int(u) for u in np.asarray(v, F).view(np.uint32))


def rtn(w, bits, rule, group):
    """Decoded values of min-max rounding, float64."""
    half, qmax = 2 ** (bits - 1), 2**bits - 1
    out = np.empty_like(w)
    for r in range(w.shape[0]):
        for g in range(0, w.shape[1], group):
            x = w[r, g : g + group]
            lo, hi = min(x.min(), 0), max(x.max(), 0)
            if rule == "asym":
                s = (hi - lo) / qmax
                z = np.clip(np.rint(-lo / s), 0, qmax)
            else:
                s, z = (hi if hi >= -lo else lo) / -half, half
            out[r, g : g + group] = s * (np.clip(np.rint(x / s) + z, 0, qmax) - z)
    return out


def quantize_acts(x, bits, group):
    if not bits:
        return x
    group = group or x.shape[1]
    out = np.empty_like(x)
    for g in range(0, x.shape[1], group):
        part = x[:, g : g + group]
        step = np.abs(part).max(1, keepdims=True) / (2 ** (bits - 1) - 1)
        out[:, g : g + group] = np.rint(part / step) * step
    return out


def stored(g, dtype):
    if dtype == "F16":
        return np.float16(g).astype(np.float64)
    u = F(g).view(np.uint32).astype(np.uint64)
    u = (u + 0x7FFF + ((u >> 16) & 1)) & 0xFFFF0000
    return u.astype(np.uint32).view(F).astype(np.float64)


def loss(p, s):
    x, share = p["x"], p["share"]
    cols = np.tile(s, share)  # input j reads channel j mod (cols / share)
    weights = acts = 0
    for w in p["w"]:
        e = rtn(w * cols, p["bits"], p["rule"], p["group"]) / cols - w
        weights += ((x @ e.T) ** 2).sum() / len(x)
        d = quantize_acts(x / cols, p["act_bits"], p["act_group"]) * cols - x
        acts += ((d @ w.T) ** 2).sum() / len(x)
    return weights + acts


def per_channel(v, share, how):
    return how(v.reshape(share, -1), 0)


def candidates(p):
    x, n, share = np.abs(p["x"]), p["x"].shape[1], p["share"]
    x_mean, x_max = per_channel(x.mean(0), share, np.mean), per_channel(x.max(0), share, np.max)
    w = np.abs(np.concatenate(p["w"]))
    rel = np.concatenate([w[:, g : g + p["group"]] / w[:, g : g + p["group"]].max(1, keepdims=True) for g in range(0, n, p["group"])], 1)
    w_mean, w_max = per_channel(rel.mean(0), share, np.mean), per_channel(w.max(0), share, np.max)
    if p["method"] == "smoothquant":
        raw = [("alpha %.2f" % (i / 20), x_max ** (i / 20) / w_max ** (1 - i / 20)) for i in range(21)]
    else:
        raw = [("duo %.2f" % (i / 19), x_mean ** (i / 19) / w_mean ** (1 - i / 19)) for i in range(20)]
        raw += [("plain %.2f" % (i / 19), x_mean ** (i / 19)) for i in range(1, 20)]
    for label, s in raw:
        s = s / np.sqrt(s.max() * s.min())
        if p["gain"] is not None:
            s = p["gain"] / stored(p["gain"] / s, p["gain_dtype"])
        yield label, s


def problem(rng, name, method, cols, share, matrices, rows, tokens, bits, rule, group, act_bits=0, act_group=0, gain_dtype="-"):
    spread = np.exp(rng.standard_normal(cols // share) * 1.2)
    x = (rng.standard_normal((tokens, cols)) @ (np.eye(cols) + 0.1 * rng.standard_normal((cols, cols)))) * np.tile(spread, share)
    w = [(rng.standard_normal((rows, cols)) * np.exp(rng.standard_normal(cols) * 0.4)).astype(F).astype(np.float64) for _ in range(matrices)]
    gain = None if gain_dtype == "-" else stored(np.exp(rng.standard_normal(cols) * 0.5), gain_dtype)
    p = dict(x=x.astype(F).astype(np.float64), w=w, bits=bits, rule=rule, group=group, act_bits=act_bits, act_group=act_group,
             share=share, method=method, gain=gain, gain_dtype=gain_dtype)
    identity = loss(p, np.ones(cols // share))
    tried = sorted([(loss(p, s), label, s) for label, s in candidates(p)], key=lambda t: t[0])
    if min(identity, tried[1][0]) < 1.01 * tried[0][0]:
        return None
    out = ["problem %s %s %d %d %d %d %d %d %s %d %d %d %s"
           % (name, method, cols, share, matrices, rows, tokens, bits, rule, group, act_bits, act_group, gain_dtype)]
    out += [hexes(r) for r in p["x"]] + [hexes(r) for m in w for r in m]
    if gain is not None:
        out.append(hexes(gain))
    out += ["choice " + tried[0][1], "identity %.9g" % identity, "loss %.9g" % tried[0][0], " ".join("%.9g" % v for v in tried[0][2])]
    return out


def main():
    rng = np.random.default_rng(11)
    out = ["# made by scripts/gen_fold_vectors.py with numpy " + np.__version__]
    for args in (("awq-asym", "awq", 32, 1, 2, 12, 64, 4, "asym", 16),
                 ("awq-full", "awq", 32, 1, 3, 8, 64, 3, "full", 32, 0, 0, "BF16"),
                 ("awq-shared", "awq", 32, 2, 1, 24, 64, 4, "full", 16),
                 ("smooth", "smoothquant", 32, 1, 2, 12, 64, 8, "full", 32, 8, 0, "F16"),
                 ("smooth-group", "smoothquant", 64, 1, 1, 16, 48, 8, "full", 64, 8, 32),
                 ("smooth-4", "smoothquant", 32, 1, 1, 16, 64, 8, "full", 32, 4, 0, "BF16")):
        made = None
        while made is None:
            made = problem(rng, *args)
        out += made
    with open(sys.argv[1], "w") as f:
        f.write("\n".join(out) + "\n")


if __name__ == "__main__":
    main()
