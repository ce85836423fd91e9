/* Values of positions: packing, and the divergence of two sets of them. */
#include "reference_internal.h"

#include "qc_alloc.h"
#include "qc_math.h"

#include <math.h>
#include <string.h>

int qc_kept_alloc(int64_t n, int64_t keep, int64_t drawn, qc_kept *ret, qc_err *err)
{
    size_t all = (size_t)n * (size_t)(keep + drawn);
    *ret = (qc_kept){.n = n, .keep = keep, .drawn = drawn};
    ret->nll = qc_calloc((size_t)n, sizeof *ret->nll);
    ret->top = qc_calloc((size_t)n, sizeof *ret->top);
    ret->ids = qc_calloc(all, sizeof *ret->ids);
    ret->levels = qc_calloc(all, sizeof *ret->levels);
    if (!ret->nll || !ret->top || !ret->ids || !ret->levels)
        return qc_fail_nomem(err, "reference scores", (unsigned long long)all * 8);
    return QC_OK;
}

void qc_kept_clear(qc_kept *kept)
{
    qc_free(kept->nll);
    qc_free(kept->top);
    qc_free(kept->ids);
    qc_free(kept->levels);
    *kept = (qc_kept){0};
}

/* ---- bytes ---- */

/* An id takes its distance from the one before it in LEB128: up to 5 bytes. */
enum { MAX_VARINT = 5 };

uint64_t qc_kept_most_bytes(int64_t keep, int64_t drawn, int64_t n)
{
    return (uint64_t)n * (6 + (uint64_t)(keep + drawn) * (MAX_VARINT + 3));
}

static int put_varint(qc_buf *buf, uint32_t x, qc_err *err)
{
    uint8_t bytes[MAX_VARINT];
    size_t n = 0;
    do {
        bytes[n] = (uint8_t)((x & 127) | (x > 127 ? 128 : 0));
        x >>= 7;
        n++;
    } while (x);
    return qc_buf_append(buf, bytes, n, err);
}

static bool get_varint(const uint8_t **at, const uint8_t *end, uint32_t *ret)
{
    uint64_t x = 0;
    for (int shift = 0; shift < 7 * MAX_VARINT && *at < end; shift += 7) {
        uint8_t byte = *(*at)++;
        x |= (uint64_t)(byte & 127) << shift;
        if (byte < 128) {
            *ret = (uint32_t)x;
            return x <= UINT32_MAX;
        }
    }
    return false;
}

/* The four planes of the NLL, two of the places, the ids, three of the levels. */
int qc_kept_pack(const qc_kept *kept, int64_t first, int64_t n, qc_buf *ret, qc_err *err)
{
    int64_t width = kept->keep + kept->drawn;
    for (int plane = 0; plane < 4; plane++)
        for (int64_t i = first; i < first + n; i++) {
            uint32_t bits;
            memcpy(&bits, &kept->nll[i], sizeof bits);
            uint8_t byte = (uint8_t)(bits >> (8 * plane));
            QC_TRY(qc_buf_append(ret, &byte, 1, err));
        }
    for (int plane = 0; plane < 2; plane++)
        for (int64_t i = first; i < first + n; i++) {
            uint8_t byte = (uint8_t)(kept->top[i] >> (8 * plane));
            QC_TRY(qc_buf_append(ret, &byte, 1, err));
        }
    for (int64_t i = first; i < first + n; i++)
        for (int64_t k = 0, before = -1; k < width; k++) {
            const int32_t *ids = kept->ids + i * width;
            before = k == 0 ? -1 : k == kept->keep ? 0 : before;
            QC_TRY(put_varint(ret, (uint32_t)(ids[k] - before - (k < kept->keep)), err));
            before = ids[k];
        }
    for (int plane = 0; plane < 3; plane++)
        for (int64_t k = first * width; k < (first + n) * width; k++) {
            uint8_t byte = (uint8_t)(kept->levels[k] >> (8 * plane));
            QC_TRY(qc_buf_append(ret, &byte, 1, err));
        }
    return QC_OK;
}

static bool unpack_ids(const uint8_t **at, const uint8_t *end, int64_t vocab, int64_t keep, int64_t drawn,
                       int32_t *ids)
{
    int64_t before = -1;
    for (int64_t k = 0; k < keep + drawn; k++) {
        uint32_t step;
        if (k == keep)
            before = 0;
        if (!get_varint(at, end, &step))
            return false;
        int64_t id = before + step + (k < keep);
        if (id >= vocab)
            return false;
        ids[k] = (int32_t)id;
        before = id;
    }
    return true;
}

bool qc_kept_unpack(const uint8_t *data, size_t n_bytes, int64_t vocab, qc_kept *kept, int64_t first,
                    int64_t n)
{
    int64_t width = kept->keep + kept->drawn;
    const uint8_t *at = data, *end = data + n_bytes;
    if (n_bytes < (size_t)n * 6)
        return false;
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = 0;
        for (int plane = 0; plane < 4; plane++)
            bits |= (uint32_t)at[plane * n + i] << (8 * plane);
        memcpy(&kept->nll[first + i], &bits, sizeof bits);
        kept->top[first + i] = at[4 * n + i] | at[5 * n + i] << 8;
        if (!isfinite(kept->nll[first + i]) || kept->nll[first + i] < 0 || kept->top[first + i] >= kept->keep)
            return false;
    }
    at += 6 * n;
    for (int64_t i = first; i < first + n; i++)
        if (!unpack_ids(&at, end, vocab, kept->keep, kept->drawn, kept->ids + i * width))
            return false;
    if (end - at != 3 * n * width)
        return false;
    for (int64_t k = 0; k < n * width; k++)
        kept->levels[first * width + k] = at[k] | at[n * width + k] << 8 | at[2 * n * width + k] << 16;
    return true;
}

/* ---- divergence ---- */

/* Below this the mass of the rest is rounding of the levels. */
#define LEAST_TAIL 0x1p-18

int32_t qc_level_of(double log_p)
{
    double steps = -log_p / QC_LEVEL_STEP;
    return steps < 0 ? 0 : steps > QC_MAX_LEVEL ? QC_MAX_LEVEL : (int32_t)(steps + 0.5);
}

double qc_tail_mass(const int32_t *levels, int64_t keep)
{
    double mass = 1;
    for (int64_t i = 0; i < keep; i++)
        mass -= exp(-levels[i] * QC_LEVEL_STEP);
    return mass > LEAST_TAIL ? mass : LEAST_TAIL;
}

/* Within the rest, with p' and q' its distributions made to sum to 1, KL(p' || q') = E_p'[r - 1 - ln r], r =
 * q' / p': every term is >= 0, so that few draws do (the drawn ids stand for p'). */
double qc_kept_kld(const int32_t *a, const int32_t *b, int64_t keep, int64_t drawn)
{
    double sum = 0, within = 0;
    for (int64_t i = 0; i < keep; i++)
        sum += exp(-a[i] * QC_LEVEL_STEP) * ((b[i] - a[i]) * QC_LEVEL_STEP);
    if (drawn == 0)
        return sum;
    double tail_a = qc_tail_mass(a, keep), tail_b = qc_tail_mass(b, keep), shift = log(tail_a / tail_b);
    for (int64_t i = keep; i < keep + drawn; i++) {
        double log_r = (a[i] - b[i]) * QC_LEVEL_STEP + shift;
        within += expm1(log_r) - log_r;
    }
    return sum + tail_a * (shift + within / (double)drawn);
}
