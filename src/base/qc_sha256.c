#include "qc_sha256.h"

#include "qc_alloc.h"
#include "qc_file.h"

#include <errno.h>
#include <fcntl.h>
#include <openssl/evp.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct qc_sha256 {
    EVP_MD_CTX *ctx;
};

qc_sha256 *qc_sha256_new(void)
{
    qc_sha256 *state = qc_alloc(1, sizeof *state);
    if (!state)
        return NULL;
    state->ctx = EVP_MD_CTX_new();
    if (!state->ctx || EVP_DigestInit_ex(state->ctx, EVP_sha256(), NULL) != 1) {
        EVP_MD_CTX_free(state->ctx);
        qc_free(state);
        return NULL;
    }
    return state;
}

void qc_sha256_update(qc_sha256 *state, const void *data, size_t n_bytes)
{
    EVP_DigestUpdate(state->ctx, data, n_bytes);
}

void qc_sha256_final(qc_sha256 *state, char ret_hex[QC_SHA256_HEX_BYTES])
{
    unsigned char digest[EVP_MAX_MD_SIZE] = {0};
    EVP_DigestFinal_ex(state->ctx, digest, NULL);
    for (int i = 0; i < 32; i++)
        snprintf(ret_hex + 2 * i, 3, "%02x", digest[i]);
    EVP_MD_CTX_free(state->ctx);
    qc_free(state);
}

int qc_sha256_buffer(const void *data, size_t n_bytes, char ret_hex[QC_SHA256_HEX_BYTES], qc_err *err)
{
    qc_sha256 *state = qc_sha256_new();
    if (!state)
        return qc_fail_nomem(err, "sha-256 state", sizeof *state);
    qc_sha256_update(state, data, n_bytes);
    qc_sha256_final(state, ret_hex);
    return QC_OK;
}

int qc_sha256_file(const char *path, char ret_hex[QC_SHA256_HEX_BYTES], qc_err *err)
{
    enum { BLOCK = 1 << 20 };
    int rc = QC_OK;
    qc_sha256 *state = qc_sha256_new();
    char *block = qc_alloc(BLOCK, 1);
    struct stat st;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* NONBLOCK: a FIFO must not hang us */
    if (fd < 0 || fstat(fd, &st) != 0)
        rc = qc_fail(err, QC_E_INPUT, "%s: %s", path, strerror(errno));
    else if (!S_ISREG(st.st_mode))
        rc = qc_fail(err, QC_E_INPUT, "%s: is not a regular file", path);
    else if (!state || !block)
        rc = qc_fail_nomem(err, "sha-256 block", BLOCK);
    while (rc == QC_OK) {
        ssize_t n = read(fd, block, BLOCK);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            rc = qc_fail(err, QC_E_INPUT, "%s: %s", path, strerror(errno));
        if (n <= 0)
            break;
        qc_sha256_update(state, block, (size_t)n);
        rc = qc_check_interrupt(err);
    }
    char hex[QC_SHA256_HEX_BYTES];
    if (state)
        qc_sha256_final(state, hex);
    if (rc == QC_OK)
        memcpy(ret_hex, hex, sizeof hex);
    if (fd >= 0)
        close(fd);
    qc_free(block);
    return rc;
}
