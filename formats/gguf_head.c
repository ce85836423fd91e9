/* Writing the head of a GGUF file: keys, tensor infos, padding. */
#include "gguf_file.h"

#include "qc_math.h"

#include <string.h>

enum { VERSION = 3 };

static int put_int(qc_buf *buf, uint64_t value, int n_bytes, qc_err *err)
{
    uint8_t le[8];
    qc_put_le(le, value, n_bytes);
    return qc_buf_append(buf, le, (size_t)n_bytes, err);
}

int qc_gguf_append_text(qc_buf *buf, const char *text, size_t n_bytes, qc_err *err)
{
    QC_TRY(put_int(buf, n_bytes, 8, err));
    return qc_buf_append(buf, text, n_bytes, err);
}

static int put_key(qc_gguf_head *head, const char *key, qc_gguf_kind kind, qc_err *err)
{
    QC_TRY(qc_gguf_append_text(&head->keys, key, strlen(key), err));
    head->n_keys++;
    return put_int(&head->keys, kind, 4, err);
}

int qc_gguf_put_int(qc_gguf_head *head, const char *key, qc_gguf_kind kind, int64_t value, qc_err *err)
{
    int n_bytes = kind <= QC_GGUF_I8 || kind == QC_GGUF_BOOL ? 1 : kind <= QC_GGUF_I16 ? 2 : 4;
    QC_TRY(put_key(head, key, kind, err));
    return put_int(&head->keys, (uint64_t)value, kind >= QC_GGUF_U64 ? 8 : n_bytes, err);
}

int qc_gguf_put_f32(qc_gguf_head *head, const char *key, float value, qc_err *err)
{
    QC_TRY(put_key(head, key, QC_GGUF_F32, err));
    return qc_buf_append(&head->keys, &value, sizeof value, err);
}

int qc_gguf_put_text(qc_gguf_head *head, const char *key, const char *text, qc_err *err)
{
    QC_TRY(put_key(head, key, QC_GGUF_STRING, err));
    return qc_gguf_append_text(&head->keys, text, strlen(text), err);
}

int qc_gguf_put_array(qc_gguf_head *head, const char *key, qc_gguf_kind kind, uint64_t n_elems,
                      const qc_buf *packed, qc_err *err)
{
    QC_TRY(put_key(head, key, QC_GGUF_ARRAY, err));
    QC_TRY(put_int(&head->keys, kind, 4, err));
    QC_TRY(put_int(&head->keys, n_elems, 8, err));
    return packed->n_bytes ? qc_buf_append(&head->keys, packed->data, packed->n_bytes, err) : QC_OK;
}

int qc_gguf_put_tensor(qc_gguf_head *head, const char *name, const qc_block_info *type, int n_dims,
                       const int64_t *ne, qc_err *err)
{
    uint64_t n = 1;
    if (strlen(name) > QC_GGUF_MAX_NAME_BYTES)
        return qc_fail(err, QC_E_UNSUPPORTED, "tensor %.200s: its name is longer than the %d bytes of GGUF",
                       name, QC_GGUF_MAX_NAME_BYTES);
    QC_TRY(qc_gguf_append_text(&head->tensors, name, strlen(name), err));
    QC_TRY(put_int(&head->tensors, (uint64_t)n_dims, 4, err));
    for (int d = 0; d < n_dims; d++) {
        QC_TRY(put_int(&head->tensors, (uint64_t)ne[d], 8, err));
        n *= (uint64_t)ne[d];
    }
    QC_TRY(put_int(&head->tensors, (uint64_t)type->id, 4, err));
    QC_TRY(put_int(&head->tensors, head->data_bytes, 8, err));
    uint64_t n_bytes = n / (uint64_t)type->n_elems * (uint64_t)type->n_bytes;
    head->data_bytes += (uint64_t)qc_round_up((int64_t)n_bytes, QC_GGUF_ALIGNMENT);
    head->n_tensors++;
    return QC_OK;
}

int qc_gguf_head_finish(const qc_gguf_head *head, qc_buf *out, qc_err *err)
{
    static const char zeros[QC_GGUF_ALIGNMENT];
    QC_TRY(qc_buf_append(out, "GGUF", 4, err));
    QC_TRY(put_int(out, VERSION, 4, err));
    QC_TRY(put_int(out, head->n_tensors, 8, err));
    QC_TRY(put_int(out, head->n_keys, 8, err));
    if (head->keys.n_bytes)
        QC_TRY(qc_buf_append(out, head->keys.data, head->keys.n_bytes, err));
    if (head->tensors.n_bytes)
        QC_TRY(qc_buf_append(out, head->tensors.data, head->tensors.n_bytes, err));
    size_t padded = (size_t)qc_round_up((int64_t)out->n_bytes, QC_GGUF_ALIGNMENT);
    return qc_buf_append(out, zeros, padded - out->n_bytes, err);
}

void qc_gguf_head_clear(qc_gguf_head *head)
{
    qc_buf_clear(&head->keys);
    qc_buf_clear(&head->tensors);
    *head = (qc_gguf_head){0};
}
