/* Inside stored references: the kept values of some positions, their packing, and the taps that fill and use
 * them. */
#ifndef QC_EVAL_REFERENCE_INTERNAL_H
#define QC_EVAL_REFERENCE_INTERNAL_H

#include "qc_buf.h"
#include "reference.h"

/* Log-probabilities are steps of 2^-17 below 0, at most 2^24 - 1 of them. */
#define QC_LEVEL_STEP 0x1p-17
#define QC_MAX_LEVEL  0xFFFFFF

/* Values of n positions. Ids of one position: the kept ones in ascending order, then the drawn ones in
 * ascending order, which may repeat. */
typedef struct qc_kept {
    int64_t n;
    int64_t keep, drawn;
    float *nll;      /* [n] */
    int32_t *top;    /* [n] place of the most likely id among the kept ones */
    int32_t *ids;    /* [n, keep + drawn] */
    int32_t *levels; /* [n, keep + drawn] */
} qc_kept;

/* Release with qc_kept_clear, also after failure. */
int qc_kept_alloc(int64_t n, int64_t keep, int64_t drawn, qc_kept *ret, qc_err *err) QC_WARN_UNUSED;
void qc_kept_clear(qc_kept *kept);

/* Positions first .. first + n - 1 as bytes, before compression / back into positions first .. of kept. False
 * if the bytes are not exactly n positions with ids in ascending order below vocab. */
int qc_kept_pack(const qc_kept *kept, int64_t first, int64_t n, qc_buf *ret, qc_err *err) QC_WARN_UNUSED;
bool qc_kept_unpack(const uint8_t *data, size_t n_bytes, int64_t vocab, qc_kept *kept, int64_t first,
                    int64_t n);

/* Most bytes that qc_kept_pack makes. */
uint64_t qc_kept_most_bytes(int64_t keep, int64_t drawn, int64_t n);

/* Log-probability as a level, and the mass that the levels of the kept ids leave to the others. */
int32_t qc_level_of(double log_p);
double qc_tail_mass(const int32_t *levels, int64_t keep);

/* KL(a || b) of one position from the levels of the same ids: exact over the kept ids, the rest as one, and
 * what lies within the rest estimated from the drawn ids. Exactly 0 for equal levels. */
double qc_kept_kld(const int32_t *a, const int32_t *b, int64_t keep, int64_t drawn);

/* Tap that picks what is kept of `kept->n` targets. seed_position: number of the first one in the text. */
typedef struct qc_keeper qc_keeper;
int qc_keeper_new(qc_kept *kept, int64_t vocab, float softcap, int64_t seed_position, qc_keeper **ret,
                  qc_err *err) QC_WARN_UNUSED;
void qc_keeper_free(qc_keeper *keeper);
qc_logit_tap qc_keeper_tap(qc_keeper *keeper);
uint64_t qc_keeper_bytes(int64_t n, int64_t keep);

/* Tap that compares the model with what was kept: fills nll_a, top_a and kld. */
typedef struct qc_comparer {
    const qc_kept *kept;
    float softcap;
    float *logits;   /* [n, keep + drawn] of the model */
    int32_t *place;  /* [n, 2] next of the kept and of the drawn ids */
    int32_t *levels; /* [keep + drawn] scratch */
} qc_comparer;
int qc_comparer_init(const qc_kept *kept, float softcap, qc_comparer *ret, qc_err *err) QC_WARN_UNUSED;
void qc_comparer_clear(qc_comparer *comparer);
qc_logit_tap qc_comparer_tap(qc_comparer *comparer);

/* Next windows of a file that is written; their values. */
int qc_reference_put(qc_reference_writer *writer, const qc_kept *kept, int64_t n_windows,
                     qc_err *err) QC_WARN_UNUSED;
/* Values of windows of a file that is read and fits, allocated here (qc_kept_clear, also after failure). */
int qc_reference_get(const qc_reference *ref, const qc_windows *windows, int64_t window0, int64_t n_windows,
                     qc_kept *ret, qc_err *err) QC_WARN_UNUSED;
/* Ids per position of a file. */
void qc_reference_sizes(const qc_reference_writer *writer, int64_t *ret_keep, int64_t *ret_drawn);

#endif
