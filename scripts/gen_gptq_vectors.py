#!/usr/bin/env python3
"""Reference vectors of GPTQ, written from the equations of the papers in float64 (numpy only).

usage: gen_gptq_vectors.py tests/data/quant/gptq.txt

Rounding: Frantar et al. 2022 (arXiv 2210.17323), with U the upper Cholesky factor of the inverse of the damped H, one
column after the other, no blocks. Min-pivot order: from its definition in arXiv 2507.18553, each Schur complement by
a solution of its own. Scales by min-max (gen_quant_vectors.py). Refit of scales and
coordinate descent: methods of arXiv 2602.02126, one scale / one code at a time. With refit, a second pass of rounding follows
the first refit, and the better of both passes is taken per row.

Only rows are kept where, in all cases, no rounding is closer than MARGIN steps to a tie (codes) or MARGIN units in the
last place (scales, F16), so that a correct float32 program gives exactly these codes and scales.

Lines of the file (hexadecimal words are bit patterns of float32, most significant digit first):
  problem NAME COLS ROWS, then the lower triangle of H (COLS lines of words), then W (ROWS lines of words)
  case BITS RULE GROUP ORDER DAMP REFIT SWEEPS, then 'error' and e H e^T summed over the rows: of RTN, after the rounding, at the end;
       then per row: scales as words; zeros in decimal ('-' if symmetric); codes as hex bytes
"""
import sys

import numpy as np

from gen_quant_vectors import F, grid_of, groups, hexes

MARGIN = 1e-3


def inputs(rng, n, n_samples, n_dead):
    """Correlated inputs with channels of very different size and a few outliers; H = X^T X / samples in float32."""
    mix = rng.standard_normal((n, n)) * (1 + np.arange(n)) ** -0.6
    x = rng.standard_normal((n_samples, n)) @ mix.T
    x *= np.exp(0.7 * rng.standard_normal(n)) * np.where(np.arange(n) % 29 == 7, 8, 1)
    x[:, rng.permutation(n)[:n_dead]] = 0
    h = (x.T @ x / n_samples).astype(F)
    return np.tril(h) + np.tril(h, -1).T


def damped(h, damp):
    """Dead columns first (diagonal = mean of the others), then the damping."""
    a = h.astype(np.float64).copy()
    d = np.diag(a).copy()
    mean = d[d > 0].mean()
    d[d == 0] = mean
    np.fill_diagonal(a, d + damp * mean)
    return a


def order_of(h, hd, rule):
    n = len(h)
    if rule == "natural":
        return np.arange(n)
    if rule == "static":
        return np.argsort(-np.diag(h).astype(np.float64), kind="stable")
    left, last = list(range(n)), []
    while left:
        to = hd[np.ix_(last, left)]
        pivots = np.diag(hd)[left] - (to * np.linalg.solve(hd[np.ix_(last, last)], to)).sum(0)
        last.append(left.pop(int(np.argmin(pivots))))
    return np.array(last[::-1])


class Rows:
    """Codes, scales (float64 holding float32 values) and zeros of many rows; .ok = no decision was close."""

    def __init__(self, w, bits, rule, group):
        n = w.shape[1]
        self.qmax, self.bits, self.of = 2**bits - 1, bits, np.arange(n) // group
        grids = [[grid_of(r[a:b], bits, rule, "F16") for a, b in groups(n, group)] for r in w]
        self.scale = np.array([[g[0] for g in row] for row in grids], np.float64)
        self.zero = np.array([[g[1] for g in row] for row in grids], np.float64)
        self.codes = np.zeros(w.shape)
        self.ok = np.ones(len(w), bool)

    def round(self, j, t):
        """Nearest code of column j for targets t, and its value."""
        s, z = self.scale[:, self.of[j]], self.zero[:, self.of[j]]
        q = t / s + z
        inside = (q > -0.5 - MARGIN) & (q < self.qmax + 0.5 + MARGIN)
        self.ok &= ~inside | (np.abs(q - np.floor(q) - 0.5) > MARGIN)
        self.codes[:, j] = np.clip(np.rint(q), 0, self.qmax)
        return s * (self.codes[:, j] - z)

    def value(self):
        return self.scale[:, self.of] * (self.codes - self.zero[:, self.of])


def rtn(rows, w):
    for j in range(w.shape[1]):
        rows.round(j, w[:, j])


def gptq(rows, w, hd, order):
    u = np.linalg.cholesky(np.linalg.inv(hd[np.ix_(order, order)])).T
    w = w[:, order].copy()
    for k, j in enumerate(order):
        err = (w[:, k] - rows.round(j, w[:, k])) / u[k, k]
        w[:, k:] -= np.outer(err, u[k, k:])


def refit(rows, w, h):
    """One scale after the other to its least-squares value for the present codes, rounded to F16."""
    for g in range(rows.scale.shape[1]):
        at = rows.of == g
        p = np.where(at, rows.codes - rows.zero[:, rows.of], 0)
        e = w - rows.value()
        b, a = ((p @ h) * e).sum(1), ((p @ h) * p).sum(1)
        used = a > 0
        s = rows.scale[:, g]
        new = np.where(used, s + b / np.where(used, a, 1), s)
        ulp = 2.0 ** (np.floor(np.log2(np.abs(new))) - 10)
        assert (ulp >= 2.0**-24).all()
        rows.ok &= np.abs(new / ulp - np.floor(new / ulp) - 0.5) > MARGIN
        new = new.astype(np.float16).astype(np.float64)
        step = new - s
        change = step * step * a - 2 * step * b
        rows.ok &= (step == 0) | (np.abs(change) > 1e-3 * (step * step * a + np.abs(2 * step * b)))
        rows.scale[:, g] = np.where(change < 0, new, s)


def descend(rows, w, h):
    """One pass of coordinate descent over the codes, in the order of columns."""
    e = w - rows.value()
    for j in range(w.shape[1]):
        if h[j, j] == 0:
            continue
        t = w[:, j] + (e @ h[:, j] - e[:, j] * h[j, j]) / h[j, j]
        e[:, j] = w[:, j] - rows.round(j, t)


def errors(rows, w, h):
    e = w - rows.value()
    return (e @ h * e).sum(1)


def solve(w, h, case):
    """Rows after all stages; e H e^T per row of RTN, after the rounding, at the end."""
    bits, rule, group, order_rule, damp, with_refit, sweeps = case
    h64, hd = h.astype(np.float64), damped(h, damp)
    w = np.where(np.diag(h) > 0, w, F(0))
    rows = Rows(w, bits, rule, group)
    w = w.astype(np.float64)
    rtn(rows, w)
    error = [errors(rows, w, h64)]
    order = order_of(h, hd, order_rule)
    gptq(rows, w, hd, order)
    error.append(errors(rows, w, h64))
    rows.ok &= error[1] < error[0] * (1 - 1e-4)  # else RTN would be taken
    if with_refit:
        codes, scale = rows.codes.copy(), rows.scale.copy()
        refit(rows, w, h64)
        gptq(rows, w, hd, order)
        second = errors(rows, w, h64)
        rows.ok &= np.abs(second - error[1]) > 1e-4 * error[1]
        worse = second > error[1]
        rows.codes[worse], rows.scale[worse] = codes[worse], scale[worse]
    for i in range(sweeps + 1):
        if with_refit:
            refit(rows, w, h64)
        if i < sweeps:
            descend(rows, w, h64)
    error.append(errors(rows, w, h64))
    return rows, error


CASES = [
    (4, "full", 16, "natural", 0.01, 0, 0), (4, "full", 32, "static", 0.01, 0, 0), (4, "full", 0, "minpivot", 0.01, 0, 0),
    (4, "asym", 16, "static", 0.1, 0, 0), (4, "asym", 32, "minpivot", 0.003, 0, 0), (4, "asym", 0, "natural", 0.05, 0, 0),
    (3, "full", 24, "static", 0.01, 0, 0), (8, "asym", 0, "static", 0.01, 0, 0), (2, "asym", 16, "minpivot", 0.1, 0, 0),
    (4, "asym", 32, "static", 0.01, 1, 0), (4, "full", 16, "static", 0.01, 0, 1), (4, "full", 32, "minpivot", 0.01, 1, 1),
    (3, "asym", 16, "static", 0.01, 1, 2), (8, "full", 0, "natural", 0.01, 1, 1),
]


def write_problem(out, rng, name, n, n_rows, n_dead):
    h = inputs(rng, n, 6 * n, n_dead)
    w = (rng.standard_t(6, (400 * n_rows, n)) * 0.05).astype(F)
    cases = [(b, r, g or n, *rest) for b, r, g, *rest in CASES]
    ok = np.all([solve(w, h, c)[0].ok for c in cases], axis=0)
    w = w[ok][:n_rows]
    assert len(w) == n_rows, ok.sum()
    out.append("problem %s %d %d" % (name, n, n_rows))
    out += [hexes(h[i, :i + 1]) for i in range(n)] + [hexes(r) for r in w]
    for case in cases:
        rows, error = solve(w, h, case)
        assert rows.ok.all()
        out.append("case %d %s %d %s %g %d %d" % case)
        out.append("error " + " ".join("%.12g" % e.sum() for e in error))
        for s, z, q in zip(rows.scale, rows.zero, rows.codes):
            out += [hexes(s.astype(F)), " ".join("%d" % v for v in z) if case[1] == "asym" else "-",
                    "".join("%02x" % int(v) for v in q)]


def main():
    rng = np.random.default_rng(11)
    out = ["# made by scripts/gen_gptq_vectors.py with numpy " + np.__version__]
    write_problem(out, rng, "square", 64, 24, 0)
    write_problem(out, rng, "dead", 96, 8, 3)
    with open(sys.argv[1], "w") as f:
        f.write("\n".join(out) + "\n")


if __name__ == "__main__":
    main()
