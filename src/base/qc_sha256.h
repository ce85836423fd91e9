/* SHA-256 (FIPS 180-4, libcrypto) of files and buffers, as lower-case hex. */
#ifndef QC_SHA256_H
#define QC_SHA256_H

#include "qc_err.h"

#include <stddef.h>

#define QC_SHA256_HEX_BYTES 65 /* 64 digits and the NUL */

typedef struct qc_sha256 qc_sha256;

/* Incremental form: new, update as often as needed, final writes the hex digest and frees. NULL when out of
 * memory. */
qc_sha256 *qc_sha256_new(void);
void qc_sha256_update(qc_sha256 *state, const void *data, size_t n_bytes);
void qc_sha256_final(qc_sha256 *state, char ret_hex[QC_SHA256_HEX_BYTES]);

/* One call. QC_E_RESOURCE when out of memory. */
int qc_sha256_buffer(const void *data, size_t n_bytes, char ret_hex[QC_SHA256_HEX_BYTES],
                     qc_err *err) QC_WARN_UNUSED;

/* Whole file, read in blocks of 1 MiB. QC_E_INPUT: unreadable; QC_E_INTERRUPTED. */
int qc_sha256_file(const char *path, char ret_hex[QC_SHA256_HEX_BYTES], qc_err *err) QC_WARN_UNUSED;

#endif
