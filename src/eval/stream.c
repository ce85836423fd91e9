#include "stream.h"

#include "qc_alloc.h"
#include "qc_file.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

int qc_stream_open(qc_stream *stream, int64_t n_tokens, int64_t hidden, bool spill,
                   const char *scratch_folder, qc_err *err)
{
    *stream = (qc_stream){.n_tokens = n_tokens, .hidden = hidden, .fd = -1};
    if (spill) {
        QC_TRY(qc_scratch_open(scratch_folder, &stream->fd, err));
        /* Claim the room now: a full disk is an error at the start, not after an hour. */
        int e = posix_fallocate(stream->fd, 0, n_tokens * hidden * (int64_t)sizeof(float));
        if (e != 0) {
            qc_stream_close(stream);
            return qc_fail(err, QC_E_RESOURCE, "scratch file of %lld bytes: %s",
                           (long long)(n_tokens * hidden * (int64_t)sizeof(float)), strerror(e));
        }
        return QC_OK;
    }
    stream->data = qc_alloc((size_t)n_tokens, (size_t)hidden * sizeof(float));
    if (!stream->data)
        return qc_fail_nomem(err, "residual stream",
                             (unsigned long long)n_tokens * (unsigned long long)hidden * 4);
    return QC_OK;
}

void qc_stream_close(qc_stream *stream)
{
    qc_free(stream->data);
    stream->data = NULL;
    if (stream->fd >= 0)
        close(stream->fd);
    stream->fd = -1;
}

int qc_stream_get(const qc_stream *stream, int64_t token0, int64_t n_tokens, float *dst, qc_err *err)
{
    size_t n_bytes = (size_t)(n_tokens * stream->hidden) * sizeof(float);
    if (stream->data) {
        memcpy(dst, stream->data + token0 * stream->hidden, n_bytes);
        return QC_OK;
    }
    off_t at = (off_t)(token0 * stream->hidden) * (off_t)sizeof(float);
    for (char *p = (char *)dst; n_bytes > 0;) {
        ssize_t n = pread(stream->fd, p, n_bytes, at);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return qc_fail(err, QC_E_RESOURCE, "scratch file: read failed: %s",
                           n < 0 ? strerror(errno) : "short file");
        p += n;
        at += n;
        n_bytes -= (size_t)n;
    }
    return QC_OK;
}

int qc_stream_put(qc_stream *stream, int64_t token0, int64_t n_tokens, const float *src, qc_err *err)
{
    size_t n_bytes = (size_t)(n_tokens * stream->hidden) * sizeof(float);
    if (stream->data) {
        memcpy(stream->data + token0 * stream->hidden, src, n_bytes);
        return QC_OK;
    }
    off_t at = (off_t)(token0 * stream->hidden) * (off_t)sizeof(float);
    for (const char *p = (const char *)src; n_bytes > 0;) {
        ssize_t n = pwrite(stream->fd, p, n_bytes, at);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return qc_fail(err, QC_E_RESOURCE, "scratch file: write failed: %s",
                           n < 0 ? strerror(errno) : "no progress");
        p += n;
        at += n;
        n_bytes -= (size_t)n;
    }
    return QC_OK;
}

int qc_stream_load(const qc_stream *stream, qc_backend *be, int64_t token0, int64_t n_tokens, float *host,
                   float *dst, qc_err *err)
{
    QC_TRY(qc_stream_get(stream, token0, n_tokens, be->host_memory ? dst : host, err));
    return be->host_memory ? QC_OK : be->upload(be, dst, host, n_tokens * stream->hidden, err);
}

int qc_stream_store(qc_stream *stream, qc_backend *be, int64_t token0, int64_t n_tokens, float *host,
                    const float *src, qc_err *err)
{
    if (!be->host_memory)
        QC_TRY(be->download(be, host, src, n_tokens * stream->hidden, err));
    return qc_stream_put(stream, token0, n_tokens, be->host_memory ? src : host, err);
}

int qc_stream_borrow(const qc_stream *stream, qc_backend *be, int64_t token0, int64_t n_tokens, float *host,
                     float *buffer, float **ret, qc_err *err)
{
    bool in_place = be->host_memory && stream->data;
    *ret = in_place ? stream->data + token0 * stream->hidden : buffer;
    return in_place ? QC_OK : qc_stream_load(stream, be, token0, n_tokens, host, buffer, err);
}

int qc_stream_give_back(qc_stream *stream, qc_backend *be, int64_t token0, int64_t n_tokens, float *host,
                        const float *buffer, const float *x, qc_err *err)
{
    return x == buffer ? qc_stream_store(stream, be, token0, n_tokens, host, x, err) : QC_OK;
}

int qc_stream_gather(const qc_stream *stream, qc_backend *be, const int32_t *tokens, int64_t n_tokens,
                     float *host, float *dst, qc_err *err)
{
    int64_t hidden = stream->hidden;
    float *rows = be->host_memory ? dst : host;
    if (be->host_memory && stream->data)
        return be->gather_rows(be, dst, stream->data, tokens, n_tokens, hidden, err);
    for (int64_t i = 0; i < n_tokens; i++)
        QC_TRY(qc_stream_get(stream, tokens[i], 1, rows + i * hidden, err));
    return be->host_memory ? QC_OK : be->upload(be, dst, host, n_tokens * hidden, err);
}
