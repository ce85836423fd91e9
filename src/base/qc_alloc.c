#include "qc_alloc.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif

#define ALIGN_BYTES 64

static atomic_long n_allocs;
static atomic_long fail_at;

static int injected_failure(void)
{
    long n = atomic_fetch_add(&n_allocs, 1) + 1;
    long f = atomic_load(&fail_at);
    return f != 0 && n == f;
}

void *qc_alloc(size_t n_elems, size_t elem_bytes)
{
    size_t n_bytes;
    void *p = NULL;
    if (injected_failure() || __builtin_mul_overflow(n_elems, elem_bytes, &n_bytes) || n_bytes > PTRDIFF_MAX)
        return NULL;
    return posix_memalign(&p, ALIGN_BYTES, n_bytes ? n_bytes : 1) ? NULL : p;
}

void *qc_calloc(size_t n_elems, size_t elem_bytes)
{
    void *p = qc_alloc(n_elems, elem_bytes);
    if (p)
        memset(p, 0, n_elems * elem_bytes);
    return p;
}

void *qc_realloc(void *p, size_t old_bytes, size_t new_bytes)
{
    void *q = qc_alloc(1, new_bytes);
    if (!q)
        return NULL;
    if (p)
        memcpy(q, p, old_bytes < new_bytes ? old_bytes : new_bytes);
    qc_free(p);
    return q;
}

void *qc_alloc_small(size_t n_bytes)
{
    return injected_failure() ? NULL : malloc(n_bytes ? n_bytes : 1);
}

char *qc_strndup(const char *s, size_t n_bytes)
{
    char *p = qc_alloc(n_bytes + 1, 1);
    if (p) {
        memcpy(p, s, n_bytes);
        p[n_bytes] = 0;
    }
    return p;
}

char *qc_strdup(const char *s)
{
    return qc_strndup(s, strlen(s));
}

char *qc_asprintf(const char *fmt, ...)
{
    va_list ap, ap2;
    va_start(ap, fmt);
    va_copy(ap2, ap);
    int n = vsnprintf(NULL, 0, fmt, ap);
    va_end(ap);
    char *p = n < 0 ? NULL : qc_alloc((size_t)n + 1, 1);
    if (p)
        vsnprintf(p, (size_t)n + 1, fmt, ap2);
    va_end(ap2);
    return p;
}

void qc_free(void *p)
{
    free(p);
}

void qc_alloc_return_large(void)
{
#ifdef __GLIBC__
    mallopt(M_MMAP_THRESHOLD, 1 << 20);
    mallopt(M_TRIM_THRESHOLD, 1 << 20);
#endif
}

void qc_alloc_trim(void)
{
#ifdef __GLIBC__
    malloc_trim(0);
#endif
}

long qc_alloc_fail_at(long nth)
{
    long n = atomic_exchange(&n_allocs, 0);
    atomic_store(&fail_at, nth);
    return n;
}
