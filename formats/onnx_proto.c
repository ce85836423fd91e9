#include "onnx_proto.h"

#include <string.h>

enum { MAX_VARINT_BYTES = 10 };

/* ---- writing ---- */

static void append(qc_proto *p, const void *data, size_t n_bytes)
{
    if (p->rc == QC_OK && n_bytes)
        p->rc = qc_buf_append(&p->buf, data, n_bytes, p->err);
}

static void put_varint(qc_proto *p, uint64_t value)
{
    uint8_t bytes[MAX_VARINT_BYTES];
    size_t n = 0;
    for (; value >= 0x80; value >>= 7)
        bytes[n++] = (uint8_t)(value | 0x80);
    bytes[n++] = (uint8_t)value;
    append(p, bytes, n);
}

static void put_tag(qc_proto *p, int field, qc_wire wire)
{
    put_varint(p, (uint64_t)field << 3 | (uint64_t)wire);
}

void qc_proto_int(qc_proto *p, int field, int64_t value)
{
    put_tag(p, field, QC_WIRE_VARINT);
    put_varint(p, (uint64_t)value);
}

void qc_proto_float(qc_proto *p, int field, float value)
{
    put_tag(p, field, QC_WIRE_32);
    append(p, &value, sizeof value);
}

void qc_proto_bytes(qc_proto *p, int field, const void *data, size_t n_bytes)
{
    put_tag(p, field, QC_WIRE_BYTES);
    put_varint(p, n_bytes);
    append(p, data, n_bytes);
}

void qc_proto_text(qc_proto *p, int field, const char *text)
{
    qc_proto_bytes(p, field, text, strlen(text));
}

void qc_proto_message(qc_proto *p, int field, qc_proto *inner)
{
    if (p->rc == QC_OK)
        p->rc = inner->rc;
    qc_proto_bytes(p, field, inner->buf.data, inner->buf.n_bytes);
    qc_buf_clear(&inner->buf);
}

/* ---- reading ---- */

static bool take_varint(qc_proto_reader *r, uint64_t *ret)
{
    uint64_t value = 0;
    for (size_t i = 0; i < MAX_VARINT_BYTES && i < r->n_bytes; i++) {
        uint64_t bits = r->data[i] & 0x7f;
        if (i == MAX_VARINT_BYTES - 1 && bits > 1)
            return false;
        value |= bits << (7 * i);
        if (r->data[i] < 0x80) {
            *ret = value;
            r->data += i + 1;
            r->n_bytes -= i + 1;
            return true;
        }
    }
    return false;
}

static bool take_bytes(qc_proto_reader *r, uint64_t n_bytes, const uint8_t **ret)
{
    if (n_bytes > r->n_bytes)
        return false;
    *ret = r->data;
    r->data += n_bytes;
    r->n_bytes -= n_bytes;
    return true;
}

int qc_proto_next(qc_proto_reader *r, qc_proto_field *ret)
{
    uint64_t tag, n;
    const uint8_t *at;
    if (r->n_bytes == 0)
        return 0;
    if (!take_varint(r, &tag) || tag >> 3 == 0 || tag >> 32)
        return QC_E_INPUT;
    *ret = (qc_proto_field){.number = (int64_t)(tag >> 3), .wire = (qc_wire)(tag & 7)};
    switch (ret->wire) {
    case QC_WIRE_VARINT:
        return take_varint(r, &ret->value) ? 1 : QC_E_INPUT;
    case QC_WIRE_64:
    case QC_WIRE_32:
        n = ret->wire == QC_WIRE_64 ? 8 : 4;
        if (!take_bytes(r, n, &at))
            return QC_E_INPUT;
        memcpy(&ret->value, at, n);
        return 1;
    case QC_WIRE_BYTES:
        if (!take_varint(r, &n) || !take_bytes(r, n, &ret->data))
            return QC_E_INPUT;
        ret->n_bytes = n;
        return 1;
    }
    return QC_E_INPUT; /* groups, which ONNX never had */
}
