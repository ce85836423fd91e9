/* The residual stream of one model over all sequences: [n_tokens, hidden] float32 on the host, in memory or
 * in an unnamed scratch file. */
#ifndef QC_EVAL_STREAM_H
#define QC_EVAL_STREAM_H

#include "qc_err.h"

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

#endif
