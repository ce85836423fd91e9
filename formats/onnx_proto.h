/* Messages in the wire format of Protocol Buffers (protobuf.dev, "Encoding"), as far as ONNX needs it:
 * varints, 32-bit numbers, and runs of bytes for strings and inner messages.
 *
 * By hand and not through a library: the format has three rules, our files a dozen messages. protobuf-c would
 * add a code generator to the build and a package for each machine that is built for, keep one heap object
 * per message of files that may be hostile, and save fewer lines than its set-up takes. */
#ifndef QC_ONNX_PROTO_H
#define QC_ONNX_PROTO_H

#include "qc_buf.h"

#include <stdbool.h>
#include <stdint.h>

/* ---- writing ---- */

/* A message in the making; the first failed call is kept in rc, the ones behind it do nothing. Start with
 * {.err = err}. */
typedef struct qc_proto {
    qc_buf buf;
    int rc; /* QC_OK or QC_E_RESOURCE */
    qc_err *err;
} qc_proto;

/* A field with a value; integers as int32, int64 and enum fields have them (two's complement in 64 bits). */
void qc_proto_int(qc_proto *p, int field, int64_t value);
void qc_proto_float(qc_proto *p, int field, float value);
void qc_proto_bytes(qc_proto *p, int field, const void *data, size_t n_bytes);
void qc_proto_text(qc_proto *p, int field, const char *text);
/* The message `inner`, which is cleared; its failure becomes that of p. */
void qc_proto_message(qc_proto *p, int field, qc_proto *inner);

/* ---- reading ---- */

typedef enum { QC_WIRE_VARINT = 0, QC_WIRE_64 = 1, QC_WIRE_BYTES = 2, QC_WIRE_32 = 5 } qc_wire;

typedef struct qc_proto_field {
    int64_t number; /* 1 .. 2^29 - 1 */
    qc_wire wire;
    uint64_t value;      /* of a varint, or the bits of a fixed number */
    const uint8_t *data; /* QC_WIRE_BYTES: inside the message */
    size_t n_bytes;
} qc_proto_field;

/* What is left of a message. */
typedef struct qc_proto_reader {
    const uint8_t *data;
    size_t n_bytes;
} qc_proto_reader;

/* Next field: 1, 0 at the end, QC_E_INPUT (without a message) if the bytes are no message. */
int qc_proto_next(qc_proto_reader *r, qc_proto_field *ret) QC_WARN_UNUSED;

#endif
