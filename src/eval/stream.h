/* The residual stream of one model over all sequences: [n_tokens, hidden] float32 on the host, in memory or
 * in an unnamed scratch file. */
#ifndef QC_EVAL_STREAM_H
#define QC_EVAL_STREAM_H

#include "backend.h"

#include <stdbool.h>
#include <stdint.h>

typedef struct qc_stream {
    int64_t n_tokens;
    int64_t hidden;
    float *data; /* NULL when spilled */
    int fd;      /* scratch file, -1 when in memory */
} qc_stream;

/* spill: keep it in a scratch file in `scratch_folder` (NULL = default). Close with qc_stream_close. */
int qc_stream_open(qc_stream *stream, int64_t n_tokens, int64_t hidden, bool spill,
                   const char *scratch_folder, qc_err *err) QC_WARN_UNUSED;
void qc_stream_close(qc_stream *stream);

/* Copy tokens token0 .. token0 + n_tokens - 1 to / from host memory [n_tokens, hidden]. */
int qc_stream_get(const qc_stream *stream, int64_t token0, int64_t n_tokens, float *dst,
                  qc_err *err) QC_WARN_UNUSED;
int qc_stream_put(qc_stream *stream, int64_t token0, int64_t n_tokens, const float *src,
                  qc_err *err) QC_WARN_UNUSED;

/* The same to / from backend memory. host [n_tokens, hidden] stages what a backend with memory of its own
 * gets; other backends copy once and leave it alone. */
int qc_stream_load(const qc_stream *stream, qc_backend *be, int64_t token0, int64_t n_tokens, float *host,
                   float *dst, qc_err *err) QC_WARN_UNUSED;
int qc_stream_store(qc_stream *stream, qc_backend *be, int64_t token0, int64_t n_tokens, float *host,
                    const float *src, qc_err *err) QC_WARN_UNUSED;

/* dst[n_tokens, hidden] (backend memory) = these tokens, in this order. */
int qc_stream_gather(const qc_stream *stream, qc_backend *be, const int32_t *tokens, int64_t n_tokens,
                     float *host, float *dst, qc_err *err) QC_WARN_UNUSED;

/* Tokens for work in place: *ret is the stream itself where the backend works in host memory and it is not
 * spilled, else they are loaded to `buffer`. What was changed goes back by give_back, which has nothing to do
 * unless x is the buffer. */
int qc_stream_borrow(const qc_stream *stream, qc_backend *be, int64_t token0, int64_t n_tokens, float *host,
                     float *buffer, float **ret, qc_err *err) QC_WARN_UNUSED;
int qc_stream_give_back(qc_stream *stream, qc_backend *be, int64_t token0, int64_t n_tokens, float *host,
                        const float *buffer, const float *x, qc_err *err) QC_WARN_UNUSED;

#endif
